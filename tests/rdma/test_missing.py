"""What a device needs and is missing: memory to lock, /dev/infiniband, pyverbs. One line says what to do."""

from __future__ import annotations

import errno

from tests.conformance.support import DEVICE
from tests.rdma.own_device import program

#: Without the right to lock memory beyond the limit, which root has.
_LIMITED = ("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock")
#: In a mount namespace of its own, where nothing is in /dev/infiniband.
_WITHOUT_FILES = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/infiniband && exec "$@"', "sh")

_SOFT = ["listens on ['soft']", "soft works"]


def test_memlock_limit() -> None:
    """With 64 KiB, registering more names the limit, its value and how to raise it; what fits goes on working."""
    region, connection, end = program("memlock", wrapper=_LIMITED)
    for line in (region, connection):
        assert line.startswith(f"{errno.ENOMEM} ibv_reg_mr: ")
        for part in ("RLIMIT_MEMLOCK", "is 64 KiB here", "ulimit -l", "limits.conf", "LimitMEMLOCK="):
            assert part in line
    assert "1048576 bytes can't be registered" in region
    assert "512 receives of 4096 bytes" in connection
    assert "recv_depth" in connection
    assert end == "goes on"


def _check(lines: list[str], hint: str) -> None:
    """Expect that a demand fails with one line that has the hint, and that without one the soft device serves."""
    named, any_rdma, *soft, listed = lines
    assert named.startswith(f"DeviceError open_device: device {DEVICE!r} can't be used; ")
    assert any_rdma.startswith("DeviceError open_device: no RDMA device is usable here; ")
    for line in (named, any_rdma):
        assert hint in line
        assert "here: soft" in line
    assert soft == _SOFT
    assert hint in listed


def test_without_device_files() -> None:
    """Without /dev/infiniband, as in a container, the errors say how to have it, and the soft device serves."""
    _check(program("missing", wrapper=_WITHOUT_FILES), "in a container: --device=/dev/infiniband")


def test_without_pyverbs() -> None:
    """Where pyverbs isn't installed the errors say what to install, and the soft device serves."""
    _check(program("without_pyverbs"), "apt install python3-pyverbs")
