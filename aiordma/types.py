"""Values that cross the floors: work requests, keys, limits, parameters. No behaviour beyond their own fields."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
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
    "PortAttr",
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
    #: A disconnect flushes the queue pair without our help.
    disconnect_flushes: bool
    max_inline_data: int
    max_send_wr: int
    max_recv_wr: int
    max_sge: int
    max_cqe: int
    #: READs and atomics the responder accepts at once (IRD).
    max_responder_resources: int
    #: READs and atomics the initiator may have outstanding (ORD).
    max_initiator_depth: int
    max_msg_size: int
    #: Private data of a connect, in bytes.
    max_connect_private_data: int
    #: Private data of an accept or reject, in bytes.
    max_accept_private_data: int


@frozen(kw_only=True)
class PortAttr:
    """State of a device's port (struct ibv_port_attr, what of it is used here)."""

    state: Literal["down", "init", "armed", "active"]
    max_mtu: int
    active_mtu: int
    link_layer: Literal["ethernet", "infiniband"]


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
    #: Seconds without a sign of life after which the peer's host is asked; None: never.
    keepalive: float | None = field(default=15.0, validator=_positive)
    #: IP type of service, None: the system's.
    tos: int | None = field(default=None, validator=attrs.validators.optional([instance_of(int), ge(0), le(255)]))
    #: Soft device: ask for CRC32C on each FPDU (RFC 5044); used if either side asks.
    crc: bool = False
