"""The exception tree, and the table from completion status to exception."""

from __future__ import annotations

import errno
import inspect

import pytest

import aiordma
from aiordma import errors
from aiordma.drivers.base import PostError
from aiordma.enums import Opcode, WCStatus
from aiordma.errors import (
    STATUS_TABLE,
    BrokenError,
    ClosedError,
    CompletionError,
    ConnectError,
    ConnectTimeoutError,
    DeviceError,
    FlushedError,
    LocalError,
    ProtocolError,
    RDMAError,
    RejectedError,
    RemoteError,
    RetryExceededError,
    RNRError,
    completion_error,
)

#: Which exception each status of ibv_wc is, written down once more.
EXPECTED: dict[WCStatus, type[CompletionError]] = {
    WCStatus.LOC_LEN_ERR: LocalError,
    WCStatus.LOC_QP_OP_ERR: LocalError,
    WCStatus.LOC_EEC_OP_ERR: LocalError,
    WCStatus.LOC_PROT_ERR: LocalError,
    WCStatus.WR_FLUSH_ERR: FlushedError,
    WCStatus.MW_BIND_ERR: LocalError,
    WCStatus.BAD_RESP_ERR: RemoteError,
    WCStatus.LOC_ACCESS_ERR: LocalError,
    WCStatus.REM_INV_REQ_ERR: RemoteError,
    WCStatus.REM_ACCESS_ERR: RemoteError,
    WCStatus.REM_OP_ERR: RemoteError,
    WCStatus.RETRY_EXC_ERR: RetryExceededError,
    WCStatus.RNR_RETRY_EXC_ERR: RNRError,
    WCStatus.LOC_RDD_VIOL_ERR: LocalError,
    WCStatus.REM_INV_RD_REQ_ERR: RemoteError,
    WCStatus.REM_ABORT_ERR: RemoteError,
    WCStatus.INV_EECN_ERR: LocalError,
    WCStatus.INV_EEC_STATE_ERR: LocalError,
    WCStatus.FATAL_ERR: LocalError,
    WCStatus.RESP_TIMEOUT_ERR: RetryExceededError,
    WCStatus.GENERAL_ERR: LocalError,
    WCStatus.TM_ERR: LocalError,
    WCStatus.TM_RNDV_INCOMPLETE: LocalError,
}


def test_the_table_is_complete() -> None:
    """Every unsuccessful status has a row, and success has none."""
    assert set(STATUS_TABLE) == set(WCStatus) - {WCStatus.SUCCESS}
    assert set(EXPECTED) == set(STATUS_TABLE)


@pytest.mark.parametrize("status", EXPECTED, ids=lambda status: status.name)
def test_status(status: WCStatus) -> None:
    """Each status is the exception that says who caused it, and carries everything that is known."""
    error = completion_error(
        status,
        opcode=Opcode.RDMA_READ,
        vendor_err=0x123,
        qp_num=7,
        peer=("10.0.0.5", 7471),
        reason="the reason",
    )
    assert type(error) is EXPECTED[status]
    assert error.status is status
    assert (error.opcode, error.vendor_err, error.qp_num) == (Opcode.RDMA_READ, 0x123, 7)
    assert (error.peer, error.reason) == (("10.0.0.5", 7471), "the reason")
    text = str(error)
    for part in ("RDMA_READ on QP 7", "10.0.0.5", status.name, "(the reason)", STATUS_TABLE[status].hint):
        assert part in text


@pytest.mark.parametrize("status", EXPECTED, ids=lambda status: status.name)
def test_each_status_has_a_hint(status: WCStatus) -> None:
    """A hint is one line, a next step, without a full stop: it ends a sentence."""
    hint = STATUS_TABLE[status].hint
    assert len(hint) > 15
    assert "\n" not in hint
    assert not hint.endswith(".")


def test_text_of_a_receive() -> None:
    """Without an opcode it is a receive; what isn't known isn't mentioned."""
    error = completion_error(WCStatus.LOC_LEN_ERR, qp_num=3)
    assert str(error).startswith("RECV on QP 3 completed with LOC_LEN_ERR: ")
    assert "recv_size" in str(error)


def test_unknown_status() -> None:
    """A status that no header knows is a general error; success is no error."""
    assert completion_error(4711).status is WCStatus.GENERAL_ERR
    with pytest.raises(KeyError):
        completion_error(WCStatus.SUCCESS)


def test_all_derive_from_one() -> None:
    """Everything that aiordma raises derives from RDMAError, and is exported from its top."""
    for name in errors.__all__:
        found = getattr(errors, name)
        if inspect.isclass(found):
            assert issubclass(found, RDMAError)
            assert getattr(aiordma, name) is found
    assert set(errors.__all__) == {
        name for name, value in vars(errors).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == errors.__name__
    }  # fmt: skip


def test_builtin_kinds() -> None:
    """Code that only knows Python's own exceptions catches ours by those."""
    assert issubclass(DeviceError, OSError)
    assert issubclass(ConnectError, ConnectionError)
    assert issubclass(BrokenError, ConnectionError)
    assert issubclass(ConnectTimeoutError, TimeoutError)
    assert not issubclass(ClosedError, OSError)


def test_device_error() -> None:
    """A DeviceError tells verb, reason and next step, and has the errno of an OSError."""
    error = DeviceError(errno.ENOMEM, "no memory", verb="ibv_reg_mr", hint="raise the limit")
    assert str(error) == "ibv_reg_mr: no memory; raise the limit"
    assert (error.errno, error.verb, error.hint) == (errno.ENOMEM, "ibv_reg_mr", "raise the limit")
    assert str(DeviceError(errno.ENODEV, "no device")) == "no device"


def test_post_error() -> None:
    """A PostError tells how many requests of the list are in flight."""
    error = PostError(errno.ENOMEM, "full", posted=3)
    assert error.posted == 3
    assert str(error) == "ibv_post_send: full"
    assert isinstance(error, DeviceError)


def test_protocol_error() -> None:
    """A ProtocolError carries the code of its Terminate, and shows it."""
    error = ProtocolError("bad", layer=1, etype=2, code=5)
    assert (error.layer, error.etype, error.code) == (1, 2, 5)
    assert str(error) == "bad (layer 1, type 2, code 0x05)"


def test_rejected_error() -> None:
    """A RejectedError carries the reason and the peer's private data."""
    error = RejectedError("no", status=28, private_data=b"why")
    assert (str(error), error.status, error.private_data) == ("no", 28, b"why")
    assert (RejectedError("no").status, RejectedError("no").private_data) == (0, b"")


def test_broken_error() -> None:
    """A BrokenError tells whether the peer disconnected in order."""
    assert BrokenError("x", orderly=True).orderly
    assert not BrokenError("x").orderly


@pytest.mark.parametrize("name", [name for name in errors.__all__ if inspect.isclass(getattr(errors, name))])
def test_documented(name: str) -> None:
    """Each exception says what it means, and the tree at the top of the module names it."""
    assert getattr(errors, name).__doc__
    assert errors.__doc__ is not None
    assert name in errors.__doc__
