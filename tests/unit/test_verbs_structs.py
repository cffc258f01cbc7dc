"""What the verbs driver passes to C: layouts, socket addresses, timers. Nothing here loads a verbs library."""

from __future__ import annotations

import ctypes
import platform
import socket
from typing import Any, Final

import pytest

from aiordma.drivers.verbs import rdmacm, structs
from aiordma.drivers.verbs.timers import ack_timeout_code, rnr_timer_code
from aiordma.errors import DeviceError
from aiordma.types import SocketAddress

#: Sizes and offsets as gcc has them on x86-64 and on arm64; tests/rdma compares with the compiler that is there.
LAYOUTS: Final[dict[type[ctypes.Structure], dict[str, int]]] = {
    structs.IbvGlobalRoute: {"flow_label": 16, "sgid_index": 20, "traffic_class": 22, "sizeof": 24},
    structs.IbvAHAttr: {"dlid": 24, "sl": 26, "is_global": 29, "port_num": 30, "sizeof": 32},
    structs.IbvQPCap: {"max_inline_data": 16, "sizeof": 20},
    structs.IbvQPAttr: {
        "path_mtu": 8, "rq_psn": 20, "dest_qp_num": 28, "qp_access_flags": 32, "cap": 36, "ah_attr": 56,
        "alt_ah_attr": 88, "pkey_index": 120, "max_rd_atomic": 126, "min_rnr_timer": 128, "port_num": 129,
        "timeout": 130, "retry_cnt": 131, "rnr_retry": 132, "rate_limit": 136, "sizeof": 144,
    },
    structs.IbvDeviceAttr: {"max_qp_rd_atom": 144, "max_qp_init_rd_atom": 156, "phys_port_cnt": 227, "sizeof": 232},
    structs.IbvDevice: {"node_type": 16, "transport_type": 20},
    structs.IbvContext: {"device": 0, "cmd_fd": 264, "async_fd": 268},
    structs.CMEventChannel: {"fd": 0, "sizeof": 4},
    structs.CMID: {"verbs": 0, "channel": 8, "context": 16, "qp": 24, "src_addr": 32, "dst_addr": 160},
    structs.CMConnParam: {
        "private_data_len": 8, "responder_resources": 9, "initiator_depth": 10, "flow_control": 11, "retry_count": 12,
        "rnr_retry_count": 13, "srq": 14, "qp_num": 16, "sizeof": 24,
    },
    structs.CMEventStruct: {"id": 0, "listen_id": 8, "event": 16, "status": 20, "conn": 24},
}  # fmt: skip


@pytest.mark.parametrize("struct", LAYOUTS, ids=lambda struct: struct.__name__)
def test_layout(struct: type[ctypes.Structure]) -> None:
    """Every field is where C has it."""
    assert platform.machine() in {"x86_64", "aarch64"}, "add this machine's layout"
    expected = LAYOUTS[struct]
    have = {name: getattr(struct, name).offset for name in expected if name != "sizeof"}
    if "sizeof" in expected:
        have["sizeof"] = ctypes.sizeof(struct)
    assert have == expected


@pytest.mark.parametrize(
    "addr",
    [("10.0.0.5", 7471), ("255.254.253.252", 65_535), ("0.0.0.0", 0), ("::1", 7471, 0, 0), ("fd77::1", 1, 0xABCDE, 0)],
)
def test_socket_address_there_and_back(addr: SocketAddress) -> None:
    """An address goes into a struct sockaddr and out again as it was."""
    assert rdmacm.unpack_sockaddr(bytes(rdmacm.pack_sockaddr(addr))) == addr


def test_link_local_address_names_its_interface() -> None:
    """The interface of a link-local address is its scope, given by name or number, and named on the way back."""
    index, name = socket.if_nameindex()[0]
    expected = (f"fe80::1%{name}", 5, 0, index)
    for addr in (f"fe80::1%{name}", 5), (f"fe80::1%{index}", 5, 0, 0), ("fe80::1", 5, 0, index):
        assert rdmacm.unpack_sockaddr(bytes(rdmacm.pack_sockaddr(addr))) == expected


def test_no_socket_address() -> None:
    """A struct sockaddr that nobody filled in is no address."""
    assert rdmacm.unpack_sockaddr(bytes(128)) == ()


@pytest.mark.parametrize("addr", [("10.0.0", 1), ("fe80::1%nosuchinterface", 1), ("1:2", 1)])
def test_bad_socket_address(addr: SocketAddress) -> None:
    """What isn't an address is an OSError, as it is of a socket; a short form such as 10.1 is none here."""
    with pytest.raises(OSError, match=r"illegal IP address|no interface"):
        rdmacm.pack_sockaddr(addr)


def test_private_data_is_kept() -> None:
    """A connection parameter points to its private data for as long as it lives."""
    param = rdmacm.conn_param(7, b"hello\0\0", responder_resources=1, initiator_depth=2, retry_count=3, rnr_retry=4)
    assert ctypes.string_at(param.private_data, param.private_data_len) == b"hello\0\0"
    assert (param.responder_resources, param.initiator_depth, param.retry_count, param.rnr_retry_count) == (1, 2, 3, 4)


def test_private_data_that_no_field_can_tell() -> None:
    """More than 255 bytes are refused; their length would be cut to eight bits."""
    with pytest.raises(DeviceError, match="300 bytes"):
        rdmacm.conn_param(7, bytes(300), responder_resources=0, initiator_depth=0, retry_count=0, rnr_retry=0)


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where librdmacm isn't installed, one line says what to install."""

    def missing(*_: Any, **__: Any) -> ctypes.CDLL:
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(
        DeviceError, match=r"librdmacm\.so\.1 isn't installed here; apt install librdmacm1t64"
    ) as caught:
        rdmacm.Library()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "code"), [(1e-9, 1), (8.192e-6, 1), (8.2e-6, 2), (0.0671088, 14), (1.0, 18), (1e9, 31)]
)
def test_ack_timeout_code(seconds: float, code: int) -> None:
    """The local ACK timeout is rounded up to 4.096 us times a power of two."""
    assert ack_timeout_code(seconds) == code


@pytest.mark.parametrize(
    ("seconds", "code"), [(1e-9, 1), (1e-5, 1), (1.1e-5, 2), (0.00064, 12), (0.49152, 31), (0.5, 0), (9.0, 0)]
)
def test_rnr_timer_code(seconds: float, code: int) -> None:
    """The RNR NAK timer is rounded up to what there is, of which code 0 is the longest."""
    assert rnr_timer_code(seconds) == code
