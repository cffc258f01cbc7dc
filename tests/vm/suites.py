"""The devices in the guest, and which suites run on which of them: data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


def _device(name: str, host: str = "", host6: str = "") -> dict[str, str]:
    named = {"AIORDMA_TEST_DEVICE": name, "AIORDMA_TEST_HOST": host, "AIORDMA_TEST_HOST6": host6}
    return {key: value for key, value in named.items() if value}


#: What tests learn of the device they run on. guest/devices makes rxe0 and siw0, guest/veth makes rxa and rxb,
#: guest/wire makes rxw in each of two guests. With the last two, HOST is the address of the other end.
DEVICES: Final[Mapping[str, Mapping[str, str]]] = {
    "soft": _device("soft"),
    "rxe": _device("rxe0", "10.77.0.1", "fd77::1"),
    "siw": _device("siw0", "10.79.0.1", "fd79::1"),
    "veth": _device("rxa", "10.78.0.2") | {"AIORDMA_TEST_NEAR": "10.78.0.1"},
    "wire": _device("rxw", "10.80.0.2", "fd80::2") | {"AIORDMA_TEST_NEAR": "10.80.0.1"},
}


#: Connections of the tests that open a thousand on the host: in a guest these alone would take 20 minutes.
MANY: Final = "100"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A set of tests, and how it is run on each of its devices."""

    name: str
    #: For pytest.
    path: str
    devices: tuple[str, ...]
    #: Seconds for one device.
    limit: float = 1800.0
    #: Processes that share its tests: as many as the guest has processors, where no test minds another one beside it.
    workers: int = 0
    #: Whether it runs on all its devices at the same time: no test minds what happens to the other ones.
    together: bool = False
    #: Shell commands in the guest before it runs, and after.
    setup: tuple[str, ...] = ('bash "$AIORDMA_VM_TOOLS/devices"',)
    teardown: tuple[str, ...] = ()
    #: Environment variables by device, over DEVICES.
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    #: Whether a second guest is at the other end of a cable; tests reach it by AIORDMA_TEST_PEER, its folder.
    peer: bool = False

    def variables(self, device: str) -> dict[str, str]:
        """Give the environment variables by which its tests learn of a device."""
        return {**DEVICES[device], **self.environment.get(device, {})}


SUITES: Final = (
    Suite(name="conformance", path="tests/conformance", devices=("soft", "rxe", "siw"), workers=2),
    # By one process: it looks at what is left behind, and at how long a removal takes.
    Suite(name="rdma", path="tests/rdma", devices=("rxe", "siw")),
    Suite(
        name="interop",
        path="tests/interop",
        devices=("soft", "rxe", "siw"),
        together=True,
        # The peer of the soft device is the kernel's siw.
        environment={"soft": {"AIORDMA_TEST_HOST": "10.79.0.1", "AIORDMA_TEST_HOST6": "fd79::1"}},
    ),
    Suite(
        name="link",
        path="tests/two_hosts/test_link.py",
        devices=("veth",),
        setup=('bash "$AIORDMA_VM_TOOLS/veth" up',),
        teardown=('bash "$AIORDMA_VM_TOOLS/veth" down',),
    ),
    Suite(
        name="bad-link",
        path="tests/two_hosts/test_bad_link.py",
        devices=("veth",),
        setup=('bash "$AIORDMA_VM_TOOLS/veth" up',),
        teardown=('bash "$AIORDMA_VM_TOOLS/veth" down',),
    ),
    Suite(
        name="host-dead",
        path="tests/two_hosts/test_host_dead.py",
        devices=("wire",),
        setup=('bash "$AIORDMA_VM_TOOLS/wire" 1',),
        peer=True,
    ),
)
