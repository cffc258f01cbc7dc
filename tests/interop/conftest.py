"""Which files are for the device under test."""

from __future__ import annotations

from tests.conformance.support import DEVICE

#: The soft device is at one end: it belongs to soft's run.
collect_ignore = [] if DEVICE == "soft" else ["test_soft_siw.py"]
#: These programs take two minutes; that librspreload's rsockets are rstream's is seen on one device.
collect_ignore += [] if DEVICE.startswith("rxe") else ["test_preload.py"]
