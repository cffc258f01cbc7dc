"""pyverbs, imported in one place: what of it is used, its errors as ours, and what older versions lack.

Importing this module imports pyverbs, so it is imported when a device is opened, not before.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from aiordma.errors import DeviceError

__all__ = [
    "CQ", "GID", "MR", "PD", "QP", "SGE", "AHAttr", "CompChannel", "Context", "GlobalRoute", "PyverbsError", "QPAttr",
    "QPCap", "QPInitAttr", "RecvWR", "SendWR", "error_number", "make_with_fd", "verb",
]  # fmt: skip

_T = TypeVar("_T")

INSTALL: Final = (
    "install rdma-core's pyverbs: apt install python3-pyverbs (for the system's Python; a virtual environment needs "
    "--system-site-packages), or dnf install python3-pyverbs"
)


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
    """Undo the logging.basicConfig() that pyverbs calls when it is imported."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        for handler in root.handlers[:]:
            if handler not in handlers:
                root.removeHandler(handler)
                handler.close()
        root.setLevel(level)


try:
    with _root_logger_kept():
        from pyverbs.addr import GID, AHAttr, GlobalRoute
        from pyverbs.cq import CQ, CompChannel
        from pyverbs.device import Context
        from pyverbs.fork import fork_init
        from pyverbs.mr import MR
        from pyverbs.pd import PD
        from pyverbs.pyverbs_error import PyverbsError
        from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
        from pyverbs.wr import SGE, RecvWR, SendWR
except ImportError as error:
    missing = isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "pyverbs"
    raise DeviceError(
        errno.ENOPKG,
        "pyverbs isn't installed" if missing else f"pyverbs doesn't load: {error}",
        verb="import pyverbs",
        hint=INSTALL if missing else "it must be of the same version as the installed rdma-core (libibverbs1)",
    ) from error


def error_number(error: PyverbsError) -> int:
    """Give the errno of an error of pyverbs', which is negative in some calls and missing in others."""
    number = abs(getattr(error, "error_code", -1))
    return number if number > 1 else errno.EIO


@contextlib.contextmanager
def verb(name: str, what: str, hints: dict[int, str] | None = None) -> Iterator[None]:
    """Translate pyverbs' errors within; `hints` has the next step by errno."""
    try:
        yield
    except PyverbsError as error:
        number = error_number(error)
        raise DeviceError(
            number, f"{what}: {os.strerror(number)}", verb=name, hint=(hints or {}).get(number, "")
        ) from error


# -- event descriptors ------------------------------------------------------------------------------------------------

#: Two threads that open something at a time couldn't tell whose new descriptor is whose.
_opening = threading.Lock()
_EVENT_FILE: Final = "anon_inode:[infinibandevent]"


def _event_fds() -> set[int]:
    """Give this process's descriptors of verbs events."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # of the listing itself, closed by now
            if str(entry.readlink()) == _EVENT_FILE:
                found.add(int(entry.name))
    return found


def make_with_fd(make: Callable[[], _T]) -> tuple[_T, int]:
    """Make a Context or a CompChannel, and give it with its event descriptor, non-blocking from now on.

    `CompChannel.fd` exists from pyverbs 57 on only, and a Context's in none: it is the one that is new afterwards.
    Other threads of ours wait meanwhile; a verbs user in this process that isn't aiordma is told apart by nothing.

    Raises:
        DeviceError: there is no new one.
    """
    with _opening:
        before = _event_fds()
        made = make()
        fd = getattr(made, "fd", None)
        if fd is None:
            new = _event_fds() - before
            if len(new) != 1:
                raise DeviceError(
                    errno.EBADF, f"{len(new)} new event descriptors where one was made", verb="ibv_open_device",
                    hint="does another thread use verbs at the same time? open devices before it starts",
                )  # fmt: skip
            fd = new.pop()
    set_nonblocking(fd)
    return made, fd


def set_nonblocking(fd: int) -> None:
    """Nothing in pyverbs lets go of the GIL, so nothing may ever wait."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NONBLOCK)


# Before the first registration, else it has no effect: a child of fork() keeps its own copy of registered pages.
# Kernels from 5.12 on do that by themselves, and this does nothing there.
with contextlib.suppress(PyverbsError):
    fork_init()
