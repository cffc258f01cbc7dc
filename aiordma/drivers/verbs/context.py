"""Open devices: what they can do, their protection domains and memory regions, and their asynchronous events."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import resource
import weakref
from collections.abc import Callable
from typing import Final, Literal, cast

from aiordma.drivers.base import CMEvent, DriverCQ, DriverPD
from aiordma.drivers.verbs import sysfs
from aiordma.drivers.verbs.api import (
    CQ,
    MR,
    PD,
    QP,
    Context,
    PyverbsError,
    QPCap,
    QPInitAttr,
    make_with_fd,
    verb,
)
from aiordma.drivers.verbs.cm_channel import VerbsCMChannel
from aiordma.drivers.verbs.completion_queue import VerbsCQ
from aiordma.drivers.verbs.queue_pair import VerbsQP
from aiordma.drivers.verbs.work_requests import INLINE_ROOM, SendChain
from aiordma.drivers.watch import unwatch, watch_readable
from aiordma.enums import Access, AsyncEventType, CMEventType, QPState
from aiordma.types import Buffer, Capabilities, GIDEntry, PortAttr

__all__ = ["VerbsContext", "VerbsMR", "VerbsPD"]

#: Linked requests of contexts that were closed: pyverbs doesn't free them, so they are used again.
_chains: list[SendChain] = []

_PORT_STATES: Final[dict[int, Literal["down", "init", "armed", "active"]]] = {
    1: "down", 2: "init", 3: "armed", 4: "active", 5: "active"
}  # fmt: skip
_LINK_ETHERNET: Final = 2
#: The vendor that the kernel's siw calls itself.
_SIW: Final = 0x626D74
_RXE: Final = 0xFFFFFF
_GID_KINDS: Final[dict[str, Literal["ib", "roce1", "roce2"]]] = {
    "IB/RoCE v1": "roce1", "RoCE v2": "roce2"
}  # fmt: skip
_QP_EVENTS: Final = (
    AsyncEventType.QP_FATAL, AsyncEventType.QP_REQ_ERR, AsyncEventType.QP_ACCESS_ERR,
    AsyncEventType.QP_LAST_WQE_REACHED,
)  # fmt: skip
_PORT_EVENTS: Final = (
    AsyncEventType.PORT_ACTIVE, AsyncEventType.PORT_ERR, AsyncEventType.LID_CHANGE, AsyncEventType.PKEY_CHANGE,
    AsyncEventType.SM_CHANGE, AsyncEventType.CLIENT_REREGISTER, AsyncEventType.GID_CHANGE,
)  # fmt: skip
_WORDS: Final = {
    AsyncEventType.QP_FATAL: "the device reports a fatal error of the queue pair",
    AsyncEventType.QP_REQ_ERR: "a request of the peer's was invalid",
    AsyncEventType.QP_ACCESS_ERR: "the peer's request was refused: key, bounds or rights",
    AsyncEventType.DEVICE_FATAL: "the device failed",
    AsyncEventType.PORT_ACTIVE: "the port is up",
    AsyncEventType.PORT_ERR: "the port is down",
}


class VerbsMR:
    """A memory region (ibv_mr)."""

    __slots__ = ("_mr", "lkey", "rkey")

    def __init__(self, pd: PD, addr: int, length: int, access: int) -> None:
        hints = {number: _memlock_hint() for number in (errno.ENOMEM, errno.EAGAIN)}
        with verb("ibv_reg_mr", f"{length} bytes can't be registered", hints):
            self._mr = MR(pd, length, access, address=addr)
        self.lkey: int = self._mr.lkey
        self.rkey: int = self._mr.rkey

    def close(self) -> None:
        """Deregister (ibv_dereg_mr)."""
        with verb("ibv_dereg_mr", "the region can't be deregistered"):
            self._mr.close()


def _memlock_hint() -> str:
    """Say what limits registered memory, where something does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return "registered memory stays in RAM: is there so much free?"
    allowed = "without limit" if hard == resource.RLIM_INFINITY else f"{hard // 1024} KiB"
    return (
        f"registered memory counts against RLIMIT_MEMLOCK, which is {soft // 1024} KiB here (hard limit: {allowed}): "
        "raise it by `ulimit -l unlimited`, memlock in /etc/security/limits.conf, or LimitMEMLOCK= of the service"
    )


class VerbsPD:
    """A protection domain (ibv_pd)."""

    def __init__(self, context: VerbsContext) -> None:
        self._sink_rights = int(Access.REMOTE_WRITE) if context.capabilities.read_sink_needs_remote_write else 0
        #: What stands for memory of no length, which the kernel doesn't register.
        self._nothing = bytearray(1)
        with verb("ibv_alloc_pd", "no protection domain"):
            self.pd = PD(context.device)

    def reg_mr(self, buffer: Buffer, addr: int, length: int, access: int) -> VerbsMR:
        """Register (ibv_reg_mr). On iWARP what a READ may land in gets the remote-write right that it needs there."""
        if access & Access.LOCAL_WRITE:
            access |= self._sink_rights
        if not length:
            addr, length = ctypes.addressof(ctypes.c_char.from_buffer(self._nothing)), 1
        return VerbsMR(self.pd, addr, length, access)

    def close(self) -> None:
        """Free (ibv_dealloc_pd); what it still has is closed before."""
        with verb("ibv_dealloc_pd", "the protection domain can't be freed"):
            self.pd.close()


class VerbsContext:
    """An open device (ibv_context), for one event loop."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self._loop = loop
        hints = {
            errno.EACCES: "this user may not open /dev/infiniband/uverbs*: check its owner and mode",
            errno.ENODEV: "is the module ib_uverbs loaded, and /dev/infiniband in this container?",
        }
        with verb("ibv_open_device", f"device {name} can't be opened", hints):
            self.device, self._fd = make_with_fd(lambda: Context(name=name))
        self._closed = False
        self._handler: Callable[[AsyncEventType, int, str], None] | None = None
        self._watch: VerbsCMChannel | None = None
        #: Live queue pairs by number.
        self.qps: dict[int, VerbsQP] = {}
        self._cqs: weakref.WeakSet[VerbsCQ] = weakref.WeakSet()
        try:
            self.capabilities = _capabilities(self.device, name)
        except BaseException:
            self.device.close()
            raise
        self._ports = sysfs.ports_of(name) or [1]
        self._port_states = {port: self._port_state(port) for port in self._ports}
        self.chain = _chains.pop() if _chains else SendChain()
        self.chain.use_for(siw=self.capabilities.empty_read_waits)
        watch_readable(loop, self._fd, self._readable)
        self._watch_removal()

    # -- what it has --------------------------------------------------------------------------------------------------

    def query_port(self, port_num: int) -> PortAttr:
        """Ask for the state of a port (ibv_query_port)."""
        with verb("ibv_query_port", f"{self.name} has no port {port_num}"):
            attr = self.device.query_port(port_num)
        return PortAttr(
            state=_PORT_STATES.get(attr.state, "down"),
            # siw gives the smallest there is for an interface that has no largest MTU.
            max_mtu=128 << max(attr.max_mtu, attr.active_mtu),
            active_mtu=128 << attr.active_mtu,
            link_layer="ethernet" if attr.link_layer == _LINK_ETHERNET else "infiniband",
            lid=attr.lid,
        )

    def query_gids(self, port_num: int) -> list[GIDEntry]:
        """Give the entries of the port's GID table that aren't zero (ibv_query_gid); none on iWARP."""
        if self.capabilities.transport == "iwarp":
            return []
        with verb("ibv_query_gid_table", f"no GID table of {self.name}"):
            found = self.device.query_gid_table(max_entries=self.device.query_port(port_num).gid_tbl_len)
        entries = []
        for entry in found:
            if entry.port_num != port_num:
                continue
            kind = sysfs.gid_attribute(self.name, port_num, "types", entry.gid_index)
            entries.append(
                GIDEntry(
                    index=entry.gid_index,
                    gid=bytes.fromhex(str(entry.gid_str()).replace(":", "")),
                    kind="ib" if self.capabilities.transport == "ib" else _GID_KINDS.get(kind, "roce1"),
                    interface=sysfs.gid_attribute(self.name, port_num, "ndevs", entry.gid_index),
                )
            )
        return entries

    def alloc_pd(self) -> VerbsPD:
        """Allocate a protection domain (ibv_alloc_pd)."""
        return VerbsPD(self)

    def create_cq(self, cqe: int, on_ready: Callable[[], None]) -> VerbsCQ:
        """Create a completion queue with a channel of its own (ibv_create_cq)."""
        cq = VerbsCQ(self.device, self._loop, cqe, on_ready)
        self._cqs.add(cq)
        return cq

    def create_qp(
        self, pd: DriverPD, send_cq: DriverCQ, recv_cq: DriverCQ, *, max_send_wr: int, max_recv_wr: int, max_sge: int
    ) -> VerbsQP:
        """Create a queue pair (ibv_create_qp), in INIT."""
        cap = QPCap(
            max_send_wr=max_send_wr, max_recv_wr=max_recv_wr, max_send_sge=max_sge, max_recv_sge=max_sge,
            max_inline_data=self.capabilities.max_inline_data,
        )  # fmt: skip
        return VerbsQP(self, cast("VerbsPD", pd), cast("VerbsCQ", send_cq), cast("VerbsCQ", recv_cq), cap)

    # -- asynchronous events ------------------------------------------------------------------------------------------

    def set_async_handler(self, handler: Callable[[AsyncEventType, int, str], None]) -> None:
        """Report asynchronous events (ibv_get_async_event) to `handler`."""
        self._handler = handler

    def describe_vendor_err(self, vendor_err: int) -> str:
        """Vendors' codes are in no public table."""
        return ""

    def _readable(self) -> None:
        """Take one event, acknowledge it, and report it."""
        try:
            event = self.device.get_async_event()
        except PyverbsError:
            return  # woken for nothing
        kind = event.event_type
        event.ack()  # before anybody destroys what it is about: that waits for the acknowledgement
        with contextlib.suppress(ValueError):  # of a kernel newer than this
            self._report_event(AsyncEventType(kind))

    def _report_event(self, kind: AsyncEventType) -> None:
        """Find out what an event is about, as pyverbs doesn't tell, and report it."""
        if kind in _QP_EVENTS:
            for qp_num in self._failed_qps():
                self._report(kind, qp_num)
        elif kind in _PORT_EVENTS:
            for port in self._changed_ports():
                self._report(kind, port)
        else:
            self._report(kind, 0)

    def _failed_qps(self) -> list[int]:
        """Queue pairs in ERR that weren't brought there by this side."""
        return [number for number, qp in self.qps.items() if not qp.failed and qp.state is QPState.ERR]

    def _changed_ports(self) -> list[int]:
        """Ports whose state differs from what was known; all, if none does."""
        states = {port: self._port_state(port) for port in self._ports}
        changed = [port for port in self._ports if states[port] != self._port_states[port]]
        self._port_states = states
        return changed or self._ports

    def _port_state(self, port: int) -> int:
        try:
            return int(self.device.query_port(port).state)
        except PyverbsError:
            return 0

    def _report(self, kind: AsyncEventType, element: int) -> None:
        if self._handler is not None:
            self._handler(kind, element, _WORDS.get(kind, ""))

    # -- removal ------------------------------------------------------------------------------------------------------

    def _watch_removal(self) -> None:
        """Bind an identifier to one of its addresses: DEVICE_REMOVAL is the only sign that can be relied on.

        Tried on rxe: no flush, no asynchronous event, and `rdma link del` waits for this context to be closed.
        """
        for address in sysfs.addresses_of(sysfs.interfaces_of(self.name)):
            channel = VerbsCMChannel(self._loop, self._on_watch_event)
            try:
                watch = channel.create_id()
                watch.bind_addr((address, 0))
                if watch.device_name == self.name:
                    self._watch = channel
                    return
            except OSError:
                pass
            channel.close()

    def _on_watch_event(self, event: CMEvent) -> None:
        if event.event == CMEventType.DEVICE_REMOVAL and self._handler is not None:
            self._handler(AsyncEventType.DEVICE_FATAL, 0, f"the RDMA device {self.name} was removed")

    def close(self) -> None:
        """Close the device (ibv_close_device), and what is left on it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._handler = None
        unwatch(self._loop, self._fd)
        if self._watch is not None:
            self._watch.close()
        for qp in list(self.qps.values()):
            qp.close()  # else pyverbs does, and ours don't know
            qp.release()
        for cq in list(self._cqs):
            cq.close()
        with verb("ibv_close_device", f"{self.name} can't be closed"):
            self.device.close()
        _chains.append(self.chain)


def _capabilities(device: Context, name: str) -> Capabilities:
    """Ask what the device can do (ibv_query_device), and add what its transport is known for."""
    with verb("ibv_query_device", f"{name} doesn't tell what it can do"):
        attr = device.query_device()
        port = device.query_port(1)
    iwarp = sysfs.is_iwarp(name)
    transport: Literal["iwarp", "roce", "ib"] = (
        "iwarp" if iwarp else "roce" if port.link_layer == _LINK_ETHERNET else "ib"
    )
    return Capabilities(
        transport=transport,
        unreceived_send_waits=not iwarp,
        rnr=not iwarp,
        write_with_imm=not iwarp,
        send_with_imm=not iwarp,
        # Only keys of memory windows and of fast registrations can be invalidated, and regions have neither here.
        send_with_invalidate=False,
        atomics=bool(attr.atomic_caps),
        success_proves="handed" if iwarp else "acknowledged",
        remote_fault_known=not iwarp,
        write_fault_known=not iwarp,
        read_sink_needs_remote_write=iwarp,
        read_access_checked=attr.vendor_id != _SIW,
        qp_fault_events=attr.vendor_id not in {_RXE, _SIW},
        disconnect_flushes=iwarp,
        # siw's answer to a READ of nothing has as many bytes as its last one, if it is still busy with that.
        empty_read_waits=attr.vendor_id == _SIW,
        late_requests_flush=attr.vendor_id not in {_RXE, _SIW},
        max_inline_data=_probe_inline(device),
        # The completions of both queues are to fit one completion queue: rxe has it the other way round.
        max_send_wr=min(attr.max_qp_wr, attr.max_cqe // 2),
        max_recv_wr=min(attr.max_qp_wr, attr.max_cqe // 2),
        max_sge=attr.max_sge,
        max_read_sge=min(attr.max_sge, attr.max_sge_rd or attr.max_sge),
        max_cqe=attr.max_cqe,
        max_responder_resources=attr.max_qp_rd_atom,
        max_initiator_depth=attr.max_qp_init_rd_atom,
        max_msg_size=port.max_msg_sz,
        # On IB and RoCE what is left of the CM's messages beside librdmacm's header; on iWARP one byte counts it.
        max_connect_private_data=251 if iwarp else 56,
        max_accept_private_data=251 if iwarp else 196,
        max_reject_private_data=251 if iwarp else 148,
    )


def _probe_inline(device: Context) -> int:
    """Find how much inline data a queue pair takes: no attribute says it, so one is made."""
    pd = PD(device)
    cq = CQ(device, 16, None, None, 0)
    try:
        size = INLINE_ROOM
        while size:
            cap = QPCap(max_send_wr=8, max_recv_wr=8, max_send_sge=1, max_recv_sge=1, max_inline_data=size)
            try:
                qp = QP(pd, QPInitAttr(qp_type=2, scq=cq, rcq=cq, cap=cap, sq_sig_all=0))
            except PyverbsError:
                size = size // 2 if size > 16 else 0
                continue
            qp.close()
            return size
        return 0
    finally:
        cq.close()
        pd.close()
