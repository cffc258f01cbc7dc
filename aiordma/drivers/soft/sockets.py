"""The soft device's sockets: how they are made, and the options that ConnParam asks for."""

from __future__ import annotations

import socket

from aiordma.types import ConnParam, SocketAddress


def open_socket(addr: SocketAddress) -> socket.socket:
    """Make a non-blocking TCP socket of this address's family."""
    sock = socket.socket(socket.AF_INET6 if ":" in str(addr[0]) else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


def bound_socket(addr: SocketAddress, interface: str = "") -> socket.socket:
    """Make a socket and bind it, to an interface too if one is named; one of IPv6 leaves IPv4 to others."""
    sock = open_socket(addr)
    try:
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if interface:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        sock.bind(addr)
    except BaseException:
        sock.close()
        raise
    return sock


def set_tos(sock: socket.socket, tos: int) -> None:
    """Set the type of service, or the traffic class."""
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, tos)
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)


def set_keepalive(sock: socket.socket, param: ConnParam) -> None:
    """Have a peer that vanished noticed within twice the keep-alive."""
    if param.keepalive is None:
        return
    # The kernel takes 32,767 s at most (MAX_TCP_KEEPIDLE).
    seconds = min(max(1, int(param.keepalive)), 32_767)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Three probes in as much time again as the idle time before them.
    for name, value in (
        ("TCP_KEEPIDLE", seconds),
        ("TCP_KEEPINTVL", max(1, seconds // 3)),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", seconds * 2000),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
