"""Connecting a queue pair without rdma_cm: addresses, GIDs, what the driver is told; and who refuses it."""

from __future__ import annotations

import ipaddress

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiordma
from aiordma import AddressError, ConnParam, GIDEntry, PortAttr, QPAddress, UnsupportedError
from aiordma.types import QPPath
from tests.unit.fake_driver import Rig, rig


def gid(index: int, address: str, kind: str = "roce2") -> GIDEntry:
    """Make an entry; an IPv4 address is mapped."""
    ip = ipaddress.ip_address(address)
    packed = ip.packed if ip.version == 6 else bytes(10) + b"\xff\xff" + ip.packed
    return GIDEntry(index=index, gid=packed, kind=kind)  # type: ignore[arg-type]


TABLE = [
    gid(0, "fe80::1", "roce1"),
    gid(1, "fe80::1"),
    gid(2, "10.0.0.1", "roce1"),
    gid(3, "fd00::1"),
    gid(4, "10.0.0.1"),
]


def roce(made: Rig) -> Rig:
    """Give the fake device a GID table and an Ethernet port."""
    made.fake.gids = list(TABLE)
    made.fake.query_port = lambda _: PortAttr(  # type: ignore[method-assign, assignment]
        state="active", max_mtu=4096, active_mtu=1024, link_layer="ethernet"
    )
    return made


@given(
    st.builds(
        QPAddress,
        qpn=st.integers(0, (1 << 24) - 1),
        psn=st.integers(0, (1 << 24) - 1),
        lid=st.integers(0, 65_535),
        gid=st.binary(min_size=16, max_size=16),
        mtu=st.sampled_from([256, 512, 1024, 2048, 4096]),
    ),
    st.binary(),
)
def test_address_on_the_wire(address: QPAddress, behind: bytes) -> None:
    """An address is 28 bytes and comes back, from the front of what is there."""
    data = address.to_bytes()
    assert len(data) == QPAddress.WIRE_SIZE
    assert QPAddress.from_bytes(data + behind) == address


@pytest.mark.parametrize("data", [b"", bytes(27), bytes(28), b"\xff" * 28])
def test_address_from_anything(data: bytes) -> None:
    """What isn't an address is a ValueError."""
    with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
        QPAddress.from_bytes(data)


def test_gids_have_16_bytes() -> None:
    """A GID of another length is a ValueError."""
    with pytest.raises(ValueError, match="16 bytes"):
        GIDEntry(index=0, gid=bytes(4), kind="roce2")
    with pytest.raises(ValueError, match="16 bytes"):
        QPAddress(qpn=1, psn=1, gid=bytes(15))


async def test_gid_by_address() -> None:
    """A GID is chosen by its address, RoCE v2's first; without one, the first that is routed, IPv4's first."""
    async with rig(transport="roce") as made:
        context = roce(made).context
        for address, index in (("10.0.0.1", 4), ("fe80::1", 1), ("fd00:0::1", 3), (None, 4)):
            assert context.gid_for(address).index == index
        made.fake.gids = TABLE[:2]
        assert context.gid_for().index == 1
        with pytest.raises(AddressError, match=r"no GID of 10\.0\.0\.9; it has: fe80::1"):
            context.gid_for("10.0.0.9")
        made.fake.gids = []
        with pytest.raises(AddressError, match="it has: none"):
            context.gid_for()


async def test_connect() -> None:
    """The driver is told the peer's address and this side's path: the smaller MTU, the depths, the timers."""
    async with rig(transport="roce", max_responder_resources=16, max_initiator_depth=8) as made:
        qp, entry = made.qp, roce(made).context.gid_for()
        local = qp.local_address(gid=entry, psn=7)
        assert local == QPAddress(qpn=qp.qp_num, psn=7, gid=entry.gid, mtu=1024)
        remote = QPAddress(qpn=99, psn=8, gid=TABLE[3].gid, mtu=512)
        qp.connect_to(remote, param=ConnParam(initiator_depth=20, responder_resources=2, retry_count=3, tos=104))
        assert made.device.connected_to == (
            remote,
            QPPath(
                port_num=1, gid_index=4, psn=7, mtu=512, responder_resources=2, initiator_depth=8,
                ack_timeout=4.096e-6 * 2**14, rnr_timer=ConnParam().rnr_timer, retry_count=3, rnr_retry=7,
                service_level=0, traffic_class=104, hop_limit=64,
            ),
        )  # fmt: skip
        assert "99" in str(qp.peer)
        assert "fd00::1" in str(qp.peer)


async def test_infiniband_by_lid() -> None:
    """Within an InfiniBand subnet the lid does; the first packet's number is random."""
    async with rig(transport="ib") as made:
        made.fake.query_port = lambda port_num: PortAttr(  # type: ignore[method-assign]
            state="active", max_mtu=4096, active_mtu=4096, link_layer="infiniband", lid=port_num + 10
        )
        local = made.qp.local_address(port_num=2)
        assert (local.lid, local.gid, local.mtu) == (12, bytes(16), 4096)
        assert len({made.qp.local_address().psn for _ in range(50)}) > 40
        made.qp.connect_to(attrs.evolve(local, qpn=5))
        assert made.device.connected_to is not None
        assert made.device.connected_to[1].gid_index is None


async def test_what_is_missing() -> None:
    """RoCE without a GID, and a connect before the own address is known, are ValueErrors; so are wild numbers."""
    async with rig(transport="roce") as made:
        with pytest.raises(ValueError, match="gid_for"):
            roce(made).qp.local_address()
        remote = QPAddress(qpn=1, psn=1)
        with pytest.raises(ValueError, match="local_address"):
            made.qp.connect_to(remote)
        made.qp.local_address(gid=TABLE[4])
        for level, hops in ((16, 64), (0, 256)):
            with pytest.raises(ValueError, match="is 0 to"):
                made.qp.connect_to(remote, service_level=level, hop_limit=hops)
        assert made.device.connected_to is None


async def test_iwarp_refuses() -> None:
    """iWARP, soft included, says which devices can; nothing happens to the queue pair."""
    context = aiordma.open_device("soft")
    pd = aiordma.ProtectionDomain(context)
    qp = pd.create_qp()
    for call in (qp.local_address, lambda: qp.connect_to(QPAddress(qpn=1, psn=1))):
        with pytest.raises(UnsupportedError, match="InfiniBand and RoCE"):
            call()
    with pytest.raises(UnsupportedError):
        qp.driver.connect_raw(QPAddress(qpn=1, psn=1), None)  # type: ignore[arg-type]
    with pytest.raises(AddressError):
        context.gid_for()
    pd.close()


async def test_closed() -> None:
    """A closed queue pair is connected no more."""
    async with rig(transport="roce") as made:
        made.qp.close()
        with pytest.raises(aiordma.ClosedError):
            made.qp.local_address(gid=TABLE[4])
