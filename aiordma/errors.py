"""The exception tree, and the one table from completion status to exception.

    RDMAError
      DeviceError (OSError)          no device, no permission, memlock limit: errno, verb, hint
      CompletionError                a work request completed unsuccessfully
        LocalError                   the fault is in what this side posted
        RemoteError                  the peer refused it: access, operation, invalid request
        RetryExceededError           the peer never acknowledged
        RNRError                     the peer had no receive posted, for too long
        FlushedError                 it was behind something that failed; __cause__ is the first failure
      ConnectError (ConnectionError)
        AddressError RouteError RejectedError UnreachableError
        ConnectTimeoutError (TimeoutError)
      ClosedError                    you closed it
      BrokenError (ConnectionError)  the world broke it
      BusyError                      two tasks misuse one object
      ProtocolError                  the peer sent what the specification forbids
      RemoteCallError                the peer's handler of a call raised an exception
      UnsupportedError               this device can't; the text says which can

`asyncio.CancelledError` passes through aiordma untouched, and every time-out is a builtin `TimeoutError`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from aiordma.enums import Opcode, WCStatus

__all__ = [
    "AddressError",
    "BrokenError",
    "BusyError",
    "ClosedError",
    "CompletionError",
    "ConnectError",
    "ConnectTimeoutError",
    "DeviceError",
    "FlushedError",
    "LocalError",
    "ProtocolError",
    "RDMAError",
    "RNRError",
    "RejectedError",
    "RemoteCallError",
    "RemoteError",
    "RetryExceededError",
    "RouteError",
    "UnreachableError",
    "UnsupportedError",
    "completion_error",
]


class RDMAError(Exception):
    """Base of everything that aiordma raises on its own account."""


class DeviceError(RDMAError, OSError):
    """A verb failed: no device, no permission, a limit of the host.

    Attributes:
        errno: the system's error number.
        verb: the verb or system call that failed.
        hint: the next step, one line.
    """

    def __init__(self, errno: int, message: str, *, verb: str = "", hint: str = "") -> None:
        OSError.__init__(self, errno, message)
        self.verb = verb
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.verb}: {self.strerror}" if self.verb else str(self.strerror)
        return f"{text}; {self.hint}" if self.hint else text


class CompletionError(RDMAError):
    """A work request completed unsuccessfully (ibv_wc.status is not IBV_WC_SUCCESS).

    Attributes:
        status: the completion's status.
        opcode: what was posted, or None for a receive.
        vendor_err: the device's own code; on the soft device the Terminate's layer, type and code.
        qp_num: the queue pair.
        peer: the peer's address, where known.
        reason: the device's explanation in words, where it has one.
    """

    def __init__(
        self,
        status: WCStatus,
        *,
        opcode: Opcode | None = None,
        vendor_err: int = 0,
        qp_num: int = 0,
        peer: object = None,
        reason: str = "",
    ) -> None:
        super().__init__(status)
        self.status = status
        self.opcode = opcode
        self.vendor_err = vendor_err
        self.qp_num = qp_num
        self.peer = peer
        self.reason = reason

    def __str__(self) -> str:
        what = self.opcode.name if self.opcode is not None else "RECV"
        text = f"{what} on QP {self.qp_num}"
        if self.peer:
            text += f" to {self.peer}"
        text += f" completed with {self.status.name}"
        if self.reason:
            text += f" ({self.reason})"
        return f"{text}: {STATUS_TABLE[self.status].hint}"


class LocalError(CompletionError):
    """The fault is in what this side posted: length, protection, state."""


class RemoteError(CompletionError):
    """The peer's device refused the request: key, bounds, right, alignment, operation."""


class RetryExceededError(CompletionError):
    """The peer's device didn't acknowledge within its retries: it is gone, or the path is."""


class RNRError(CompletionError):
    """The peer had no receive posted, for longer than the retries allow."""


class FlushedError(CompletionError):
    """The request was queued behind a failure or a close; `__cause__` is the first failure, where there was one."""


class ConnectError(RDMAError, ConnectionError):
    """A connection couldn't be established."""


class AddressError(ConnectError):
    """The host name doesn't resolve, or no local device reaches the address (RDMA_CM_EVENT_ADDR_ERROR)."""


class RouteError(ConnectError):
    """There is no route to the peer (RDMA_CM_EVENT_ROUTE_ERROR)."""


class RejectedError(ConnectError):
    """The peer answered no (RDMA_CM_EVENT_REJECTED).

    Attributes:
        status: the reason the connection manager gives: 28 when the peer's program rejected, 8 for no listener.
        private_data: what the peer's program sent along with its reject.
    """

    def __init__(self, message: str, *, status: int = 0, private_data: bytes = b"") -> None:
        super().__init__(message)
        self.status = status
        self.private_data = private_data


class UnreachableError(ConnectError):
    """The peer's host didn't answer, or answered with something else than RDMA (RDMA_CM_EVENT_UNREACHABLE)."""


class ConnectTimeoutError(ConnectError, TimeoutError):
    """The handshake wasn't finished in time."""


class ClosedError(RDMAError):
    """You closed this object. Not raised when the peer or the network ended it: that is BrokenError."""


class BrokenError(RDMAError, ConnectionError):
    """The connection ended from outside: the peer closed or died, a fault ended it. Not raised after your close().

    Attributes:
        orderly: the peer disconnected; False where a fault or the network ended the connection.
    """

    def __init__(self, message: str, *, orderly: bool = False) -> None:
        super().__init__(message)
        self.orderly = orderly


class BusyError(RDMAError):
    """Two tasks use one object in a way that would interleave their data."""


class ProtocolError(RDMAError):
    """The peer sent what the specification forbids.

    Attributes:
        layer: where iWARP forbids it, of the Terminate that answers it: 0 RDMAP, 1 DDP, 2 LLP/MPA (RFC 5040 section
            4.8). By default RDMAP, and with type and code 0 a catastrophic error of this side's stream.
        etype: the layer's error type.
        code: the layer's error code.
    """

    def __init__(self, message: str, *, layer: int = 0, etype: int = 0, code: int = 0) -> None:
        super().__init__(message)
        self.layer = layer
        self.etype = etype
        self.code = code

    def __str__(self) -> str:
        where = (self.layer, self.etype, self.code)
        return str(self.args[0]) + (f" (layer {where[0]}, type {where[1]}, code {where[2]:#04x})" if any(where) else "")


class RemoteCallError(RDMAError):
    """The peer's handler of a call raised an exception, or the call was cancelled there.

    Attributes:
        type: the name of the exception's class.
        text: what the exception says.
    """

    def __init__(self, type: str, text: str) -> None:  # noqa: A002 - it is the type
        super().__init__(type, text)
        self.type = type
        self.text = text

    def __str__(self) -> str:
        return f"the peer's handler raised {self.type}" + (f": {self.text}" if self.text else "")


class UnsupportedError(RDMAError):
    """This device can't do that; the text says which can. Nothing was posted and the connection is unharmed."""


class _Row(NamedTuple):
    error: type[CompletionError]
    hint: str


_LOCAL_BUG = "the request itself is wrong; check the local buffers and their protection domain"
_NOT_RC = "this status belongs to a transport aiordma doesn't use"

#: Every unsuccessful status of enum ibv_wc_status, its exception, and the next step.
STATUS_TABLE: Final[dict[WCStatus, _Row]] = {
    WCStatus.LOC_LEN_ERR: _Row(
        LocalError, "a buffer is too short for the message; give a larger recv_size in ConnParam, or a longer sink"
    ),
    WCStatus.LOC_QP_OP_ERR: _Row(
        LocalError,
        f"{_LOCAL_BUG}; a receive on rxe: the message is longer than recv_size; a request on siw: or the connection "
        "broke while it was sent",
    ),
    WCStatus.LOC_EEC_OP_ERR: _Row(LocalError, _NOT_RC),
    WCStatus.LOC_PROT_ERR: _Row(
        LocalError, "a local buffer isn't registered in this protection domain, was freed, or lacks LOCAL_WRITE"
    ),
    WCStatus.WR_FLUSH_ERR: _Row(FlushedError, "the connection ended before this request was executed; see the cause"),
    WCStatus.MW_BIND_ERR: _Row(LocalError, "the memory window couldn't be bound; check the region's MW_BIND right"),
    WCStatus.BAD_RESP_ERR: _Row(
        RemoteError, "the peer's answer doesn't fit the request; its device or program is faulty"
    ),
    WCStatus.LOC_ACCESS_ERR: _Row(LocalError, "the peer wrote where this side gave no right"),
    WCStatus.REM_INV_REQ_ERR: _Row(
        RemoteError, "the peer's device refused the request as invalid: length, alignment or operation"
    ),
    WCStatus.REM_ACCESS_ERR: _Row(
        RemoteError, "check that key, bounds and access rights fit the region the peer offers, and that it still exists"
    ),
    WCStatus.REM_OP_ERR: _Row(RemoteError, "the peer's device couldn't execute the request; see the peer's log"),
    WCStatus.RETRY_EXC_ERR: _Row(RetryExceededError, "the peer is gone or unreachable; reconnect"),
    WCStatus.RNR_RETRY_EXC_ERR: _Row(RNRError, "the peer posts too few receives; raise its recv_depth or rnr_retry"),
    WCStatus.LOC_RDD_VIOL_ERR: _Row(LocalError, _NOT_RC),
    WCStatus.REM_INV_RD_REQ_ERR: _Row(RemoteError, _NOT_RC),
    WCStatus.REM_ABORT_ERR: _Row(RemoteError, "the peer aborted the operation; reconnect"),
    WCStatus.INV_EECN_ERR: _Row(LocalError, _NOT_RC),
    WCStatus.INV_EEC_STATE_ERR: _Row(LocalError, _NOT_RC),
    WCStatus.FATAL_ERR: _Row(LocalError, "the device failed; see the kernel's log, then open it anew"),
    WCStatus.RESP_TIMEOUT_ERR: _Row(RetryExceededError, "the peer didn't respond in time; reconnect"),
    WCStatus.GENERAL_ERR: _Row(LocalError, "the device reports an unspecified error; see vendor_err and its log"),
    WCStatus.TM_ERR: _Row(LocalError, _NOT_RC),
    WCStatus.TM_RNDV_INCOMPLETE: _Row(LocalError, _NOT_RC),
}


def completion_error(
    status: int,
    *,
    opcode: Opcode | None = None,
    vendor_err: int = 0,
    qp_num: int = 0,
    peer: object = None,
    reason: str = "",
) -> CompletionError:
    """Make the exception that belongs to a completion's status.

    Raises:
        KeyError: for SUCCESS, which isn't an error.
    """
    known = WCStatus(status) if status in WCStatus.__members__.values() else WCStatus.GENERAL_ERR
    return STATUS_TABLE[known].error(
        known, opcode=opcode, vendor_err=vendor_err, qp_num=qp_num, peer=peer, reason=reason
    )
