"""Values that cross the floors: work requests, keys, limits, parameters. No behaviour beyond their own fields."""

from __future__ import annotations

import ipaddress
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, TypeAlias

import attrs
from attrs import field, frozen
from attrs.validators import ge, instance_of, le

from aiordma.enums import Opcode, SendFlags

__all__ = [
    "SGE",
    "Buffer",
    "Capabilities",
    "ConnParam",
    "DeviceInfo",
    "GIDEntry",
    "PortAttr",
    "QPAddress",
    "QPPath",
    "RecvWR",
    "RemoteRegion",
    "RunWR",
    "SendWR",
    "SocketAddress",
]

#: Anything that exports a contiguous buffer: `collections.abc.Buffer` exists from Python 3.12 on only.
Buffer: TypeAlias = Any
#: A socket address of AF_INET or AF_INET6: host, port and, for IPv6, flow and scope.
SocketAddress: TypeAlias = tuple[Any, ...]

_REMOTE: Final = struct.Struct(">QQI")
_MAX_U64: Final = (1 << 64) - 1
_MAX_U32: Final = (1 << 32) - 1


def bounds(addrs: Sequence[int]) -> tuple[int, int]:
    """Give the lowest and the highest of some addresses, of which there is at least one."""
    if isinstance(addrs, range):  # 0.1 us, where looking at 64 costs 2
        return (addrs[0], addrs[-1]) if addrs.step > 0 else (addrs[-1], addrs[0])
    return min(addrs), max(addrs)


class SGE:
    """One element of a gather or scatter list (struct ibv_sge).

    Attributes:
        addr: address of the first byte.
        length: in bytes.
        lkey: local key of the memory region it lies in.
    """

    __slots__ = ("addr", "length", "lkey")

    def __init__(self, addr: int, length: int, lkey: int) -> None:
        self.addr = addr
        self.length = length
        self.lkey = lkey

    def __repr__(self) -> str:
        return f"{type(self).__name__}(addr={self.addr:#x}, length={self.length}, lkey={self.lkey:#x})"


class SendWR:
    """A send work request (struct ibv_send_wr).

    Made once per ledger slot and changed in place: construction is the dearest step of a post. From the post
    until its completion is polled it belongs to the driver, which may keep it; the memory in `sg_list` and
    `inline_data` stays referenced through it for as long.

    Attributes:
        wr_id: comes back in the completion.
        opcode: what to do.
        send_flags: FENCE, SIGNALED, SOLICITED. Unsignalled requests complete silently if they succeed.
        sg_list: local memory, in order.
        inline_data: bytes to send in place of `sg_list`, not registered (ibv_wr_set_inline_data).
        remote_addr: of the peer's memory; 8-byte aligned for atomics.
        rkey: key of the peer's memory.
        compare_add: the addend of FETCH_ADD, the value compared by CMP_AND_SWP.
        swap: the new value of CMP_AND_SWP.
        imm_data: 32 bits for the peer's completion, or the key that SEND_WITH_INV invalidates there.
        driver_data: the driver's own, for as long as the slot lives.
    """

    __slots__ = (
        "compare_add",
        "driver_data",
        "imm_data",
        "inline_data",
        "opcode",
        "remote_addr",
        "rkey",
        "send_flags",
        "sg_list",
        "swap",
        "wr_id",
    )

    def __init__(
        self,
        opcode: Opcode = Opcode.SEND,
        sg_list: Sequence[SGE] = (),
        *,
        wr_id: int = 0,
        remote_addr: int = 0,
        rkey: int = 0,
        send_flags: int = SendFlags.SIGNALED,
        inline_data: bytes | None = None,
        imm_data: int = 0,
        compare_add: int = 0,
        swap: int = 0,
    ) -> None:
        self.wr_id = wr_id
        self.opcode = opcode
        self.send_flags = int(send_flags)
        self.sg_list = sg_list
        self.inline_data = inline_data
        self.remote_addr = remote_addr
        self.rkey = rkey
        self.compare_add = compare_add
        self.swap = swap
        self.imm_data = imm_data
        self.driver_data: Any = None

    def __repr__(self) -> str:
        return f"<SendWR {self.wr_id} {Opcode(self.opcode).name} {list(self.sg_list)}>"


class RunWR(SendWR):
    """A run: READs or WRITEs of one size under one local and one remote key, posted as one.

    It stands for `count` work requests that complete as such. Their wr_id go up by two; `wr_id` is the last one's, as
    are the send flags: the ones before are unsignalled.

    Attributes:
        count: so many.
        size: bytes of each.
        lkey: local key of all.
        local_addrs: where the local pieces are.
        remote_addrs: where the peer's are.
    """

    __slots__ = ("count", "lkey", "local_addrs", "remote_addrs", "size")

    def __init__(
        self, opcode: Opcode, size: int, lkey: int, rkey: int, local_addrs: Sequence[int], remote_addrs: Sequence[int]
    ) -> None:
        super().__init__(opcode, rkey=rkey)
        self.size = size
        self.lkey = lkey
        self.local_addrs = local_addrs
        self.remote_addrs = remote_addrs
        self.count = len(local_addrs)

    def expand(self, start: int = 0) -> list[SendWR]:
        """Give the work requests it stands for, from number `start` on."""
        first = self.wr_id - 2 * (self.count - 1)
        requests = [
            SendWR(
                self.opcode, (SGE(self.local_addrs[index], self.size, self.lkey),), wr_id=first + 2 * index,
                remote_addr=self.remote_addrs[index], rkey=self.rkey, send_flags=0,
            )
            for index in range(start, self.count)
        ]  # fmt: skip
        requests[-1].send_flags = self.send_flags
        return requests


class RecvWR:
    """A receive work request (struct ibv_recv_wr): where the next message goes."""

    __slots__ = ("driver_data", "sg_list", "wr_id")

    def __init__(self, sg_list: Sequence[SGE] = (), *, wr_id: int = 0) -> None:
        self.wr_id = wr_id
        self.sg_list = sg_list
        self.driver_data: Any = None

    def __repr__(self) -> str:
        return f"<RecvWR {self.wr_id} {list(self.sg_list)}>"


def _in_address_space(region: RemoteRegion, _: object, length: int) -> None:
    """A peer may send anything: no slice of a region has an address that doesn't fit 64 bits."""
    if region.addr + length > 1 << 64:
        raise ValueError(f"{length} bytes from {region.addr:#x} on leave the address space")


@frozen(slots=True)
class RemoteRegion:
    """A piece of a peer's memory: address, length and remote key. Slices like a memoryview.

    It is a value and gives no right by itself: the peer's device checks key, bounds and right at each access.
    On the wire it is 20 bytes, big-endian: address 8, length 8, rkey 4.
    """

    addr: int = field(validator=[instance_of(int), ge(0), le(_MAX_U64)])
    length: int = field(validator=[instance_of(int), ge(0), le(_MAX_U64), _in_address_space])
    rkey: int = field(validator=[instance_of(int), ge(0), le(_MAX_U32)])

    #: Length of `to_bytes()`.
    WIRE_SIZE = 20

    def to_bytes(self) -> bytes:
        """Encode as 20 bytes, to be sent to the peer that shall use it."""
        return _REMOTE.pack(self.addr, self.length, self.rkey)

    @classmethod
    def from_bytes(cls, data: Buffer) -> RemoteRegion:
        """Decode from the front of `data`; private data may arrive zero-padded, so more bytes are ignored.

        Raises:
            ValueError: fewer than 20 bytes.
        """
        if len(data) < _REMOTE.size:
            raise ValueError(f"a RemoteRegion is {_REMOTE.size} bytes, got {len(data)}")
        return cls(*_REMOTE.unpack_from(data))

    def __len__(self) -> int:
        return self.length

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, index: slice) -> RemoteRegion:
        try:
            start, stop, step = index.indices(self.length)
        except AttributeError:
            raise TypeError(f"a RemoteRegion takes a slice, not {type(index).__name__}") from None
        if step != 1:
            raise ValueError("a RemoteRegion is contiguous: no step in a slice")
        part = _new(RemoteRegion)
        _set_addr(part, self.addr + start)
        _set_length(part, stop - start if stop > start else 0)
        _set_rkey(part, self.rkey)
        return part

    def __repr__(self) -> str:
        # The key is a capability: it doesn't belong in a log.
        return f"RemoteRegion(addr={self.addr:#x}, length={self.length})"


# Slicing is on the path of every READ: the slots' own setters pass by the frozen __setattr__ and the validators.
_new = object.__new__
_set_addr = RemoteRegion.addr.__set__  # type: ignore[attr-defined,misc]
_set_length = RemoteRegion.length.__set__  # type: ignore[attr-defined,misc]
_set_rkey = RemoteRegion.rkey.__set__  # type: ignore[attr-defined,misc]


@frozen(kw_only=True)
class Capabilities:
    """What a device can do, and what its answers prove. Drives UnsupportedError and the conformance suite."""

    #: "iwarp", "roce" or "ib".
    transport: Literal["iwarp", "roce", "ib"]
    #: A SEND without a posted receive waits for one.
    unreceived_send_waits: bool
    #: The device retries on receiver-not-ready.
    rnr: bool
    write_with_imm: bool
    send_with_imm: bool
    send_with_invalidate: bool
    atomics: bool
    #: Success of a WRITE or SEND proves: "acknowledged" by the responder's device, or "handed" to TCP.
    success_proves: Literal["acknowledged", "handed"]
    #: A refused READ is reported with the peer's reason, not only as a flush.
    remote_fault_known: bool
    #: A refused WRITE fails its own request, instead of succeeding and then ending the connection.
    write_fault_known: bool
    #: The sink of a READ needs REMOTE_WRITE; the driver adds it at registration.
    read_sink_needs_remote_write: bool
    #: A READ of memory that was registered without REMOTE_READ is refused: siw doesn't look, and lends all that it has.
    read_access_checked: bool = True
    #: A queue pair's fault is reported as an asynchronous event too: the kernel's software devices don't.
    qp_fault_events: bool
    #: A disconnect flushes the queue pair without our help.
    disconnect_flushes: bool
    #: A READ of nothing must not follow another one that still waits for its data (siw); `barrier()` sees to that.
    empty_read_waits: bool = False
    #: What is posted to a queue pair that went to error by itself is flushed, as the specifications have it; not so on
    #: siw, which flushes once what it has, nor for receives on rxe, whose kernel isn't told of them: the rest is ended
    #: on this side.
    late_requests_flush: bool = True
    max_inline_data: int
    max_send_wr: int
    max_recv_wr: int
    max_sge: int
    #: Pieces that one READ fills: fewer on iWARP, where `Connection.read` posts a list of READs for more.
    max_read_sge: int
    max_cqe: int
    #: READs and atomics the responder accepts at once (IRD).
    max_responder_resources: int
    #: READs and atomics the initiator may have outstanding (ORD).
    max_initiator_depth: int
    max_msg_size: int
    #: Private data of a connect, in bytes.
    max_connect_private_data: int
    #: Private data of an accept, in bytes.
    max_accept_private_data: int
    #: Private data of a reject, in bytes.
    max_reject_private_data: int


@frozen(kw_only=True)
class PortAttr:
    """State of a device's port (struct ibv_port_attr, what of it is used here)."""

    state: Literal["down", "init", "armed", "active"]
    max_mtu: int
    active_mtu: int
    link_layer: Literal["ethernet", "infiniband"]
    #: InfiniBand's local identifier, 0 where there is none.
    lid: int = 0


def _names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(names)


@frozen(kw_only=True)
class DeviceInfo:
    """A device that is here, or that could be: see `aiordma.devices`."""

    name: str
    #: "soft" or "verbs".
    driver: str
    #: In words, for a person.
    transport: str
    available: bool
    detail: str = ""
    #: Where not available: the one line that says what to install or do.
    hint: str = ""
    #: Names of the network interfaces that its ports are on, as far as known.
    interfaces: tuple[str, ...] = field(default=(), converter=_names)
    #: IP addresses of these interfaces, as text, as far as known.
    addresses: tuple[str, ...] = field(default=(), converter=_names)
    #: It takes TCP's ports on its interfaces, as iWARP in the kernel or in hardware does.
    takes_tcp_ports: bool = False


_GID_SIZE: Final = 16
_QP_ADDRESS: Final = struct.Struct(">IIHH16s")
_MAX_U24: Final = (1 << 24) - 1
_MTUS: Final = (256, 512, 1024, 2048, 4096)


def _is_gid(_: object, __: object, gid: bytes) -> None:
    if len(gid) != _GID_SIZE:
        raise ValueError(f"a GID is {_GID_SIZE} bytes, not {len(gid)}")


@frozen(kw_only=True)
class GIDEntry:
    """An entry of a port's GID table (struct ibv_gid_entry)."""

    #: Its place in the table.
    index: int
    gid: bytes = field(validator=[instance_of(bytes), _is_gid])
    #: "ib", "roce1" (an Ethernet frame, not routed) or "roce2" (UDP).
    kind: Literal["ib", "roce1", "roce2"]
    #: The network interface, as far as known.
    interface: str = ""

    @property
    def address(self) -> str:
        """The GID in IPv6's notation, or IPv4's if it stands for such an address."""
        address = ipaddress.IPv6Address(self.gid)
        return str(address.ipv4_mapped or address)


@frozen(kw_only=True)
class QPAddress:
    """Where a queue pair is reached without rdma_cm: what the two programs exchange on a way of their own.

    On the wire it is 28 bytes, big-endian: qpn 4, psn 4, lid 2, mtu 2, gid 16.
    """

    #: The queue pair's number.
    qpn: int = field(validator=[instance_of(int), ge(0), le(_MAX_U24)])
    #: Number of the first packet it sends.
    psn: int = field(validator=[instance_of(int), ge(0), le(_MAX_U24)])
    #: InfiniBand's local identifier, 0 on RoCE.
    lid: int = field(default=0, validator=[instance_of(int), ge(0), le(0xFFFF)])
    #: The port's address; zeros on InfiniBand where the lid alone is used.
    gid: bytes = field(default=bytes(_GID_SIZE), validator=[instance_of(bytes), _is_gid])
    #: Bytes of a packet's payload at most: the smaller one of the two sides' is used.
    mtu: int = field(default=1024, validator=attrs.validators.in_(_MTUS))

    #: Length of `to_bytes()`.
    WIRE_SIZE = 28

    def to_bytes(self) -> bytes:
        """Encode as 28 bytes."""
        return _QP_ADDRESS.pack(self.qpn, self.psn, self.lid, self.mtu, self.gid)

    @classmethod
    def from_bytes(cls, data: Buffer) -> QPAddress:
        """Decode from the front of `data`; more bytes are ignored.

        Raises:
            ValueError: fewer than 28 bytes, or a field is out of its range.
        """
        if len(data) < _QP_ADDRESS.size:
            raise ValueError(f"a QPAddress is {_QP_ADDRESS.size} bytes, got {len(data)}")
        qpn, psn, lid, mtu, gid = _QP_ADDRESS.unpack_from(data)
        return cls(qpn=qpn, psn=psn, lid=lid, mtu=mtu, gid=gid)


@frozen(kw_only=True)
class QPPath:
    """How to get from a queue pair to its peer's: what ibv_modify_qp needs besides the peer's address."""

    #: Of this side.
    port_num: int
    #: Of this side's GID, or None: the peer is reached by its lid alone.
    gid_index: int | None
    #: Number of the first packet that this side sends.
    psn: int
    #: Bytes of a packet's payload.
    mtu: int
    #: READs and atomics accepted from the peer at once (max_dest_rd_atomic).
    responder_resources: int
    #: READs and atomics outstanding at once (max_rd_atomic).
    initiator_depth: int
    #: Seconds until a packet is sent again; the device rounds up.
    ack_timeout: float
    #: Seconds that the peer is told to wait where no receive is posted here; the device rounds up.
    rnr_timer: float
    retry_count: int
    rnr_retry: int
    service_level: int
    traffic_class: int
    hop_limit: int


def _at_least(low: int) -> Any:
    return [instance_of(int), ge(low)]


def _positive(_: object, attribute: Any, seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"{attribute.name} is more than 0 seconds, and finite, or None, not {seconds}")


@frozen(kw_only=True)
class ConnParam:
    """Parameters of a connection (struct rdma_conn_param, and the sizes of its queues).

    The two sides need not agree: each value describes this side's queues or what it asks for.
    """

    #: Bytes of the largest message this side receives; a longer one ends the connection with LOC_LEN_ERR.
    recv_size: int = field(default=4096, validator=_at_least(0))
    #: Receives posted ahead; messages beyond wait at the sender or, on the soft device, up to a bound here.
    recv_depth: int = field(default=16, validator=_at_least(1))
    #: Requests posted at once; more wait in order on this side.
    max_send_wr: int = field(default=256, validator=_at_least(1))
    #: Elements in one gather or scatter list.
    max_sge: int = field(default=4, validator=_at_least(1))
    #: READs and atomics accepted from the peer at once (IRD); None: what the device offers.
    responder_resources: int | None = field(default=None, validator=attrs.validators.optional(_at_least(0)))
    #: READs and atomics outstanding at once (ORD); None: what the device offers.
    initiator_depth: int | None = field(default=None, validator=attrs.validators.optional(_at_least(0)))
    #: Transport retries (IB and RoCE), 0 to 7.
    retry_count: int = field(default=7, validator=[instance_of(int), ge(0), le(7)])
    #: Receiver-not-ready retries (IB and RoCE), 7 is for ever.
    rnr_retry: int = field(default=7, validator=[instance_of(int), ge(0), le(7)])
    #: Seconds that a peer is told to wait before it sends again what found no receive posted here (IB and RoCE):
    #: up to 0.65536, rounded up to what the InfiniBand specification has.
    rnr_timer: float = field(default=0.00064, validator=[instance_of((int, float)), _positive])
    #: Seconds without an acknowledgement after which a packet is sent again (IB and RoCE), rounded up to 4.096 us times
    #: a power of two; None: what the route suggests.
    ack_timeout: float | None = field(default=None, validator=_positive)
    #: Seconds for finding the device that reaches an address, and again for finding the way there.
    resolve_timeout: float = field(default=2.0, validator=[instance_of((int, float)), _positive])
    #: Seconds without a sign of life after which the peer's host is asked; None: never.
    keepalive: float | None = field(default=15.0, validator=_positive)
    #: IP type of service, None: the system's.
    tos: int | None = field(default=None, validator=attrs.validators.optional([instance_of(int), ge(0), le(255)]))
    #: Soft device: ask for CRC32C on each FPDU (RFC 5044); used if either side asks.
    crc: bool = False
