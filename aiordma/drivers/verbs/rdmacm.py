"""librdmacm bound by hand, what of it is used here: calls that return or raise, and no policy.

pyverbs' own binding can't tell which identifier an event belongs to, and hides its status and the channel's descriptor.
Identifiers and channels are the addresses of librdmacm's structs, as plain integers. ctypes lets go of the GIL during
a call: `connect` may take minutes on iWARP, where the kernel connects TCP inside it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import struct
from ctypes import c_char, c_char_p, c_int, c_size_t, c_uint8, c_void_p
from errno import EACCES, EADDRINUSE, EADDRNOTAVAIL, EAGAIN, EINVAL, EMFILE, ENODEV, ENOENT, EPERM
from typing import Any, Final

from attrs import frozen

from aiordma.drivers.verbs.structs import (
    CMID,
    CMConnParam,
    CMEventChannel,
    CMEventStruct,
    IbvContext,
    IbvDevice,
    IbvDeviceAttr,
    IbvQPAttr,
)
from aiordma.errors import DeviceError
from aiordma.types import SocketAddress

__all__ = ["DEVICE_MAX", "CMConnParam", "IbvQPAttr", "Library", "RawEvent", "conn_param", "library"]

#: rdma_conn_param.responder_resources and initiator_depth: as much as the device and, on accept, the request allow.
DEVICE_MAX: Final = 0xFF
#: enum rdma_port_space.
_PS_TCP: Final = 0x0106
#: Options of rdma_set_option: level, then names.
_OPTION_ID: Final = 0
_OPTION_TOS: Final = 0
_OPTION_REUSEADDR: Final = 1
_OPTION_AFONLY: Final = 2
#: enum ibv_transport_type.
_TRANSPORT_IWARP: Final = 1
#: Bits of an attribute mask that only kernels speak of: addresses of layer 2, which ibv_modify_qp doesn't take.
_KERNEL_MASK: Final = 0b1111 << 21

_PACKAGES: Final = (
    "apt install librdmacm1t64 (librdmacm1 on Debian 12, Ubuntu 22.04 and older), or dnf install librdmacm"
)
#: The next step, by errno, wherever no call has a better one.
_HINTS: Final = {
    ENODEV: "no RDMA device is here, or none has this address: `rdma link` lists them",
    ENOENT: "the kernel's rdma_ucm isn't loaded (modprobe rdma_ucm), or this container has no /dev/infiniband/rdma_cm",
    EACCES: "this user may not open /dev/infiniband/rdma_cm",
    EPERM: "the kernel's rdma_ucm and this librdmacm don't fit each other",
    EMFILE: "this process has too many files open (ulimit -n)",
}
_BIND_HINTS: Final = {
    EADDRINUSE: "another program listens there; take another port, or 0 for a free one",
    EADDRNOTAVAIL: "this address isn't one of this machine's",
    ENODEV: "no RDMA device has this address: `rdma link` lists them with their network interfaces",
    EACCES: "ports below 1024 need privileges",
}


@frozen
class RawEvent:
    """What was in a struct rdma_cm_event that is acknowledged by now. `id` and `listen_id` are addresses, or 0."""

    id: int
    listen_id: int
    event: int
    status: int
    private_data: bytes
    responder_resources: int
    initiator_depth: int


def pack_sockaddr(addr: SocketAddress) -> ctypes.Array[c_char]:
    """Make a struct sockaddr of an address; one of IPv6 may name its interface (fe80::1%eth0).

    Raises:
        OSError: it is no address, or there is no such interface.
    """
    host, port = str(addr[0]), int(addr[1])
    if ":" not in host:
        packed = struct.pack("=H2s4s8x", socket.AF_INET, port.to_bytes(2), socket.inet_pton(socket.AF_INET, host))
    else:
        plain, _, interface = host.partition("%")
        flow, scope = (*addr[2:4], 0, 0)[:2]
        if interface and not scope:
            scope = int(interface) if interface.isdecimal() else socket.if_nametoindex(interface)
        packed = struct.pack(
            "=H2s4s16sI",
            socket.AF_INET6, port.to_bytes(2), int(flow).to_bytes(4), socket.inet_pton(socket.AF_INET6, plain), scope,
        )  # fmt: skip
    return ctypes.create_string_buffer(packed, 128)


def unpack_sockaddr(raw: bytes) -> SocketAddress:
    """Read a struct sockaddr, as socket.getsockname() gives it; empty if there is none in it."""
    (family,) = struct.unpack_from("=H", raw)
    port = int.from_bytes(raw[2:4])
    if family == socket.AF_INET:
        return (socket.inet_ntoa(raw[4:8]), port)
    if family != socket.AF_INET6:
        return ()
    host = socket.inet_ntop(socket.AF_INET6, raw[8:24])
    (scope,) = struct.unpack_from("=I", raw, 24)
    if scope and raw[8] == 0xFE and raw[9] & 0xC0 == 0x80:
        try:
            host += f"%{socket.if_indextoname(scope)}"
        except OSError:  # the interface is gone
            host += f"%{scope}"
    return (host, port, int.from_bytes(raw[4:8]), scope)


def conn_param(
    qp_num: int,
    private_data: bytes,
    *,
    responder_resources: int,
    initiator_depth: int,
    retry_count: int,
    rnr_retry: int,
) -> CMConnParam:
    """Make a struct rdma_conn_param, which keeps the memory of its private data.

    Raises:
        DeviceError: the private data is longer than its length field tells.
    """
    if len(private_data) > 255:
        raise DeviceError(
            EINVAL, f"{len(private_data)} bytes of private data; rdma_cm carries 255", verb="rdma_connect"
        )
    buffer = ctypes.create_string_buffer(private_data, len(private_data)) if private_data else None
    param = CMConnParam(
        private_data=ctypes.addressof(buffer) if buffer else None,
        private_data_len=len(private_data),
        responder_resources=responder_resources,
        initiator_depth=initiator_depth,
        flow_control=1,
        retry_count=retry_count,
        rnr_retry_count=rnr_retry,
        qp_num=qp_num,
    )
    param.buffer = buffer
    return param


def _load(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name, use_errno=True)
    except OSError as error:
        raise DeviceError(ENOENT, f"{name} isn't installed here", verb="dlopen", hint=_PACKAGES) from error


#: Arguments of the functions that return 0, or -1 with errno.
_FUNCTIONS: Final[dict[str, list[Any]]] = {
    "rdma_create_id": [c_void_p, ctypes.POINTER(c_void_p), c_void_p, c_int],
    "rdma_destroy_id": [c_void_p],
    "rdma_bind_addr": [c_void_p, c_void_p],
    "rdma_resolve_addr": [c_void_p, c_void_p, c_void_p, c_int],
    "rdma_resolve_route": [c_void_p, c_int],
    "rdma_listen": [c_void_p, c_int],
    "rdma_connect": [c_void_p, ctypes.POINTER(CMConnParam)],
    "rdma_establish": [c_void_p],
    "rdma_accept": [c_void_p, ctypes.POINTER(CMConnParam)],
    "rdma_reject": [c_void_p, c_char_p, c_uint8],
    "rdma_disconnect": [c_void_p],
    "rdma_get_cm_event": [c_void_p, ctypes.POINTER(c_void_p)],
    "rdma_ack_cm_event": [c_void_p],
    "rdma_set_option": [c_void_p, c_int, c_int, c_void_p, c_size_t],
    "rdma_init_qp_attr": [c_void_p, ctypes.POINTER(IbvQPAttr), ctypes.POINTER(c_int)],
}


class Library:
    """The functions of librdmacm, and of libibverbs the two that tell of an identifier's device."""

    def __init__(self) -> None:
        cma = _load("librdmacm.so.1")
        verbs = _load("libibverbs.so.1")
        self._functions = {}
        for name, arguments in _FUNCTIONS.items():
            function = getattr(cma, name)
            function.argtypes = arguments
            function.restype = c_int
            self._functions[name] = function
        self._create_event_channel = cma.rdma_create_event_channel
        self._create_event_channel.argtypes = []
        self._create_event_channel.restype = c_void_p
        self._destroy_event_channel = cma.rdma_destroy_event_channel
        self._destroy_event_channel.argtypes = [c_void_p]
        self._destroy_event_channel.restype = None
        self._get_device_name = verbs.ibv_get_device_name
        self._get_device_name.argtypes = [c_void_p]
        self._get_device_name.restype = c_char_p
        self._query_device = verbs.ibv_query_device
        self._query_device.argtypes = [c_void_p, ctypes.POINTER(IbvDeviceAttr)]
        self._query_device.restype = c_int

    def _call(self, verb: str, *arguments: Any, hints: dict[int, str] = _HINTS, about: str = "") -> None:
        if self._functions[verb](*arguments):
            number = ctypes.get_errno()
            text = os.strerror(number)
            hint = hints.get(number) or _HINTS.get(number, "")
            raise DeviceError(number, f"{about}: {text}" if about else text, verb=verb, hint=hint)

    # -- the event channel ------------------------------------------------------------------------------------------

    def create_event_channel(self) -> tuple[int, int]:
        """Open an event channel: gives it and its descriptor, which doesn't block (rdma_create_event_channel)."""
        channel = self._create_event_channel()
        if not channel:
            number = ctypes.get_errno() or ENODEV
            raise DeviceError(
                number, os.strerror(number), verb="rdma_create_event_channel", hint=_HINTS.get(number, "")
            )
        fd: int = CMEventChannel.from_address(channel).fd
        os.set_blocking(fd, False)
        return channel, fd

    def destroy_event_channel(self, channel: int) -> None:
        """Close an event channel whose identifiers are all destroyed (rdma_destroy_event_channel)."""
        self._destroy_event_channel(channel)

    def get_event(self, channel: int) -> RawEvent | None:
        """Take the next event, and acknowledge it; None if there is none (rdma_get_cm_event, rdma_ack_cm_event)."""
        pointer = c_void_p()
        if self._functions["rdma_get_cm_event"](channel, ctypes.byref(pointer)):
            number = ctypes.get_errno()
            if number == EAGAIN:
                return None
            raise DeviceError(number, os.strerror(number), verb="rdma_get_cm_event")
        assert pointer.value is not None
        event = CMEventStruct.from_address(pointer.value)
        conn = event.conn
        data = ctypes.string_at(conn.private_data, conn.private_data_len) if conn.private_data else b""
        raw = RawEvent(
            event.id or 0,
            event.listen_id or 0,
            event.event,
            event.status,
            data,
            conn.responder_resources,
            conn.initiator_depth,
        )
        self._call("rdma_ack_cm_event", pointer)
        return raw

    # -- identifiers ------------------------------------------------------------------------------------------------

    def create_id(self, channel: int) -> int:
        """Create an identifier for connections (rdma_create_id, RDMA_PS_TCP)."""
        pointer = c_void_p()
        self._call("rdma_create_id", channel, ctypes.byref(pointer), None, _PS_TCP)
        assert pointer.value is not None
        return pointer.value

    def destroy_id(self, cm_id: int) -> None:
        """Destroy an identifier (rdma_destroy_id). Waits for the acknowledgement of its events, and on iWARP for an
        answer that is under way.
        """  # noqa: D205
        self._call("rdma_destroy_id", cm_id)

    def bind_addr(self, cm_id: int, addr: SocketAddress) -> None:
        """Bind an identifier to a local address (rdma_bind_addr), as listening sockets are: ports of connections that
        ended are taken over, and IPv6 leaves IPv4 to others.
        """  # noqa: D205
        one = c_int(1)
        packed = pack_sockaddr(addr)
        self._call("rdma_set_option", cm_id, _OPTION_ID, _OPTION_REUSEADDR, ctypes.byref(one), ctypes.sizeof(one))
        if ":" in str(addr[0]):
            self._call("rdma_set_option", cm_id, _OPTION_ID, _OPTION_AFONLY, ctypes.byref(one), ctypes.sizeof(one))
        self._call("rdma_bind_addr", cm_id, packed, hints=_BIND_HINTS, about=f"{addr[0]} port {addr[1]}")

    def set_tos(self, cm_id: int, tos: int) -> None:
        """Set the type of service (RDMA_OPTION_ID_TOS)."""
        value = c_uint8(tos)
        self._call("rdma_set_option", cm_id, _OPTION_ID, _OPTION_TOS, ctypes.byref(value), ctypes.sizeof(value))

    def resolve_addr(self, cm_id: int, src: SocketAddress | None, dst: SocketAddress, timeout_ms: int) -> None:
        """Start to look for the device that reaches an address (rdma_resolve_addr)."""
        source = pack_sockaddr(src) if src is not None else None
        self._call("rdma_resolve_addr", cm_id, source, pack_sockaddr(dst), timeout_ms)

    def resolve_route(self, cm_id: int, timeout_ms: int) -> None:
        """Start to look for the way (rdma_resolve_route). Waits for the answer of ibacm where that service runs."""
        self._call("rdma_resolve_route", cm_id, timeout_ms)

    def listen(self, cm_id: int, backlog: int) -> None:
        """Take connection requests (rdma_listen)."""
        self._call("rdma_listen", cm_id, backlog, hints=_BIND_HINTS)

    def connect(self, cm_id: int, param: CMConnParam) -> None:
        """Start to connect (rdma_connect). On iWARP it waits until TCP is connected."""
        self._call("rdma_connect", cm_id, ctypes.byref(param))

    def establish(self, cm_id: int) -> None:
        """Answer a connect response (rdma_establish)."""
        self._call("rdma_establish", cm_id)

    def accept(self, cm_id: int, param: CMConnParam) -> None:
        """Accept a connection request (rdma_accept)."""
        self._call("rdma_accept", cm_id, ctypes.byref(param))

    def reject(self, cm_id: int, private_data: bytes) -> None:
        """Reject a connection request (rdma_reject)."""
        if len(private_data) > 255:
            raise DeviceError(
                EINVAL, f"{len(private_data)} bytes of private data; rdma_cm carries 255", verb="rdma_reject"
            )
        self._call("rdma_reject", cm_id, private_data, len(private_data))

    def disconnect(self, cm_id: int) -> None:
        """Start to disconnect, or answer the peer's disconnect (rdma_disconnect)."""
        self._call("rdma_disconnect", cm_id)

    def init_qp_attr(self, cm_id: int, state: int) -> tuple[IbvQPAttr, int]:
        """Give the attributes that bring a queue pair of this connection to a state (rdma_init_qp_attr)."""
        attr = IbvQPAttr(qp_state=state)
        mask = c_int()
        self._call("rdma_init_qp_attr", cm_id, ctypes.byref(attr), ctypes.byref(mask))
        return attr, mask.value & ~_KERNEL_MASK

    # -- what an identifier knows -----------------------------------------------------------------------------------

    def local_addr(self, cm_id: int) -> SocketAddress:
        """Give this side's address; empty if it has none yet (rdma_get_local_addr)."""
        return unpack_sockaddr(bytes(CMID.from_address(cm_id).src_addr))

    def peer_addr(self, cm_id: int) -> SocketAddress:
        """Give the peer's address; empty if it has none yet (rdma_get_peer_addr)."""
        return unpack_sockaddr(bytes(CMID.from_address(cm_id).dst_addr))

    def _device(self, cm_id: int) -> int | None:
        verbs = CMID.from_address(cm_id).verbs
        device: int | None = IbvContext.from_address(verbs).device if verbs else None
        return device

    def device_name(self, cm_id: int) -> str | None:
        """Give the device's name; None if it is bound to none (ibv_get_device_name)."""
        device = self._device(cm_id)
        return self._get_device_name(device).decode() if device else None

    def is_iwarp(self, cm_id: int) -> bool:
        """Whether the device it is bound to speaks iWARP."""
        device = self._device(cm_id)
        return device is not None and IbvDevice.from_address(device).transport_type == _TRANSPORT_IWARP

    def release_removed(self, cm_id: int) -> None:
        """Let go of a device that was removed, after DEVICE_REMOVAL on an identifier of it. Idempotent.

        librdmacm opens each device it meets, and keeps it open until the process ends. For a device whose driver can't
        part from open contexts (rxe and siw can't), the kernel's removal waits for that end, and with it `rdma link
        del`. So what it has open becomes something harmless, under the same numbers.
        """
        verbs = CMID.from_address(cm_id).verbs
        if not verbs:
            return
        context = IbvContext.from_address(verbs)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            for fd in (context.cmd_fd, context.async_fd):
                os.dup2(null, fd, inheritable=False)
        finally:
            os.close(null)

    def read_limits(self, cm_id: int) -> tuple[int, int]:
        """Give the device's limits of READs and atomics accepted and outstanding on one queue pair (ibv_query_device).

        Numbers that rdma_cm takes: below DEVICE_MAX.
        """
        attr = IbvDeviceAttr()
        number = self._query_device(CMID.from_address(cm_id).verbs, ctypes.byref(attr))
        if number:
            raise DeviceError(number, os.strerror(number), verb="ibv_query_device")
        return min(attr.max_qp_rd_atom, DEVICE_MAX - 1), min(attr.max_qp_init_rd_atom, DEVICE_MAX - 1)


@functools.cache
def library() -> Library:
    """Load librdmacm, once.

    Raises:
        DeviceError: it isn't installed; the hint names the package.
    """
    return Library()
