"""What /sys tells of RDMA devices, without opening them: names, transports, interfaces, addresses, GID types."""

from __future__ import annotations

import ctypes
import functools
import os
import socket
from ctypes import POINTER, Structure, c_char_p, c_int, c_uint, c_ushort, c_void_p
from pathlib import Path
from typing import Final

__all__ = ["addresses_of", "gid_attribute", "interfaces_of", "is_iwarp", "names", "ports_of"]

ROOT: Final = Path("/sys/class/infiniband")


def _text(path: Path) -> str:
    """Read a file of /sys: empty if it is missing or, as an empty entry of a table answers, EINVAL."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def names(root: Path = ROOT) -> list[str]:
    """Give the names of the kernel's RDMA devices."""
    try:
        return sorted(path.name for path in root.iterdir())
    except OSError:
        return []


def is_iwarp(name: str, root: Path = ROOT) -> bool:
    """Whether a device speaks iWARP: its node type is RNIC."""
    return _text(root / name / "node_type").startswith("4")


def ports_of(name: str, root: Path = ROOT) -> list[int]:
    """Give the numbers of a device's ports."""
    try:
        return sorted(int(path.name) for path in (root / name / "ports").iterdir())
    except OSError:
        return []


def port_text(name: str, port_num: int, what: str, root: Path = ROOT) -> str:
    """Read one of a port's files."""
    return _text(root / name / "ports" / str(port_num) / what)


def gid_attribute(name: str, port_num: int, what: str, index: int, root: Path = ROOT) -> str:
    """Read an attribute, `types` or `ndevs`, of an entry of a port's GID table."""
    return port_text(name, port_num, f"gid_attrs/{what}/{index}", root)


def interfaces_of(name: str, root: Path = ROOT) -> tuple[str, ...]:
    """Give the network interfaces that a device's ports are on."""
    found: dict[str, None] = {}
    for port_num in ports_of(name, root):
        folder = root / name / "ports" / str(port_num) / "gid_attrs" / "ndevs"
        try:
            indexes = sorted(map(int, os.listdir(folder)))  # noqa: PTH208 - a thousand paths take a connect's time
        except OSError:
            indexes = []
        empty = 0
        for index in indexes:
            interface = gid_attribute(name, port_num, "ndevs", index, root)
            if interface:
                found[interface] = None
            empty = 0 if interface else empty + 1
            if empty > 16:  # rxe's table has 1,024 entries, each a read, and fills from the front
                break
    if not found:
        try:
            found = dict.fromkeys(sorted(path.name for path in (root / name / "device" / "net").iterdir()))
        except OSError:
            parent = _text(root / name / "parent")  # rxe and siw of older kernels
            found = {parent: None} if parent else {}
    return tuple(found)


class _Sockaddr(Structure):
    _fields_ = (("family", c_ushort), ("data", ctypes.c_ubyte * 26))


class _Ifaddrs(Structure):
    """struct ifaddrs."""


_Ifaddrs._fields_ = (
    ("next", POINTER(_Ifaddrs)),
    ("name", c_char_p),
    ("flags", c_uint),
    ("addr", POINTER(_Sockaddr)),
    ("netmask", c_void_p),
    ("destination", c_void_p),
    ("data", c_void_p),
)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.getifaddrs.argtypes = [POINTER(POINTER(_Ifaddrs))]
    libc.getifaddrs.restype = c_int
    libc.freeifaddrs.argtypes = [POINTER(_Ifaddrs)]
    return libc


def addresses_of(interfaces: tuple[str, ...]) -> tuple[str, ...]:
    """Give the IP addresses of network interfaces (getifaddrs), IPv4 first; no link-local ones of IPv6."""
    if not interfaces:
        return ()
    libc = _libc()
    first = POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(first)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    found: list[tuple[int, str]] = []
    try:
        entry = first
        while bool(entry):  # a null pointer is false
            item = entry.contents
            if item.addr and item.name.decode() in interfaces:
                raw = bytes(item.addr.contents.data)
                family = item.addr.contents.family
                if family == socket.AF_INET:
                    found.append((4, socket.inet_ntop(family, raw[2:6])))
                elif family == socket.AF_INET6 and raw[6:8] != b"\xfe\x80":
                    found.append((6, socket.inet_ntop(family, raw[6:22])))
            entry = item.next
    finally:
        libc.freeifaddrs(first)
    return tuple(address for _, address in sorted(found, key=lambda pair: pair[0]))
