"""The names and the values of <infiniband/verbs.h> and <rdma/rdma_cma.h>, without their prefixes."""

from __future__ import annotations

import enum

__all__ = [
    "Access",
    "AsyncEventType",
    "CMEventType",
    "Opcode",
    "QPState",
    "RejectReason",
    "SendFlags",
    "WCFlags",
    "WCOpcode",
    "WCStatus",
]


class Access(enum.IntFlag):
    """Rights of a memory region (enum ibv_access_flags). Local reading needs none."""

    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    REMOTE_ATOMIC = 8


class Opcode(enum.IntEnum):
    """What a send work request does (enum ibv_wr_opcode)."""

    RDMA_WRITE = 0
    RDMA_WRITE_WITH_IMM = 1
    SEND = 2
    SEND_WITH_IMM = 3
    RDMA_READ = 4
    ATOMIC_CMP_AND_SWP = 5
    ATOMIC_FETCH_AND_ADD = 6
    LOCAL_INV = 7
    BIND_MW = 8
    SEND_WITH_INV = 9


class SendFlags(enum.IntFlag):
    """Flags of a send work request (enum ibv_send_flags)."""

    FENCE = 1
    SIGNALED = 2
    SOLICITED = 4
    INLINE = 8


class WCOpcode(enum.IntEnum):
    """What a completion is of (enum ibv_wc_opcode)."""

    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    COMP_SWAP = 3
    FETCH_ADD = 4
    BIND_MW = 5
    LOCAL_INV = 6
    RECV = 128
    RECV_RDMA_WITH_IMM = 129


class WCFlags(enum.IntFlag):
    """Which optional fields of a completion hold (enum ibv_wc_flags)."""

    GRH = 1
    WITH_IMM = 2
    WITH_INV = 8


class WCStatus(enum.IntEnum):
    """How a work request ended (enum ibv_wc_status)."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    LOC_RDD_VIOL_ERR = 14
    REM_INV_RD_REQ_ERR = 15
    REM_ABORT_ERR = 16
    INV_EECN_ERR = 17
    INV_EEC_STATE_ERR = 18
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21
    TM_ERR = 22
    TM_RNDV_INCOMPLETE = 23


class QPState(enum.IntEnum):
    """State of a queue pair (enum ibv_qp_state)."""

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6


class AsyncEventType(enum.IntEnum):
    """What a device reports outside of completions (enum ibv_event_type)."""

    CQ_ERR = 0
    QP_FATAL = 1
    QP_REQ_ERR = 2
    QP_ACCESS_ERR = 3
    COMM_EST = 4
    SQ_DRAINED = 5
    PATH_MIG = 6
    PATH_MIG_ERR = 7
    DEVICE_FATAL = 8
    PORT_ACTIVE = 9
    PORT_ERR = 10
    LID_CHANGE = 11
    PKEY_CHANGE = 12
    SM_CHANGE = 13
    SRQ_ERR = 14
    SRQ_LIMIT_REACHED = 15
    QP_LAST_WQE_REACHED = 16
    CLIENT_REREGISTER = 17
    GID_CHANGE = 18
    WQ_FATAL = 19


class CMEventType(enum.IntEnum):
    """What the connection manager reports (enum rdma_cm_event_type)."""

    ADDR_RESOLVED = 0
    ADDR_ERROR = 1
    ROUTE_RESOLVED = 2
    ROUTE_ERROR = 3
    CONNECT_REQUEST = 4
    CONNECT_RESPONSE = 5
    CONNECT_ERROR = 6
    UNREACHABLE = 7
    REJECTED = 8
    ESTABLISHED = 9
    DISCONNECTED = 10
    DEVICE_REMOVAL = 11
    MULTICAST_JOIN = 12
    MULTICAST_ERROR = 13
    ADDR_CHANGE = 14
    TIMEWAIT_EXIT = 15


class RejectReason(enum.IntEnum):
    """Why a connection was rejected: the IB CM's numbers, which the soft device uses too."""

    INVALID_SERVICE_ID = 8
    STALE_CONNECTION = 10
    CONSUMER_DEFINED = 28
