"""The values of <infiniband/verbs.h> and <rdma/rdma_cma.h>, in the order of those headers."""

from __future__ import annotations

import enum

import pytest

from aiordma import enums
from aiordma.enums import (
    Access,
    AsyncEventType,
    CMEventType,
    Opcode,
    QPState,
    RejectReason,
    SendFlags,
    WCFlags,
    WCOpcode,
    WCStatus,
)

#: Enumerations that the headers count from 0 without a gap: their names in that order, without prefix.
COUNTED: dict[type[enum.IntEnum], str] = {
    WCStatus: """
        SUCCESS LOC_LEN_ERR LOC_QP_OP_ERR LOC_EEC_OP_ERR LOC_PROT_ERR WR_FLUSH_ERR MW_BIND_ERR
        BAD_RESP_ERR LOC_ACCESS_ERR REM_INV_REQ_ERR REM_ACCESS_ERR REM_OP_ERR RETRY_EXC_ERR
        RNR_RETRY_EXC_ERR LOC_RDD_VIOL_ERR REM_INV_RD_REQ_ERR REM_ABORT_ERR INV_EECN_ERR
        INV_EEC_STATE_ERR FATAL_ERR RESP_TIMEOUT_ERR GENERAL_ERR TM_ERR TM_RNDV_INCOMPLETE""",
    Opcode: """
        RDMA_WRITE RDMA_WRITE_WITH_IMM SEND SEND_WITH_IMM RDMA_READ ATOMIC_CMP_AND_SWP
        ATOMIC_FETCH_AND_ADD LOCAL_INV BIND_MW SEND_WITH_INV""",
    QPState: "RESET INIT RTR RTS SQD SQE ERR",
    AsyncEventType: """
        CQ_ERR QP_FATAL QP_REQ_ERR QP_ACCESS_ERR COMM_EST SQ_DRAINED PATH_MIG PATH_MIG_ERR
        DEVICE_FATAL PORT_ACTIVE PORT_ERR LID_CHANGE PKEY_CHANGE SM_CHANGE SRQ_ERR SRQ_LIMIT_REACHED
        QP_LAST_WQE_REACHED CLIENT_REREGISTER GID_CHANGE WQ_FATAL""",
    CMEventType: """
        ADDR_RESOLVED ADDR_ERROR ROUTE_RESOLVED ROUTE_ERROR CONNECT_REQUEST CONNECT_RESPONSE
        CONNECT_ERROR UNREACHABLE REJECTED ESTABLISHED DISCONNECTED DEVICE_REMOVAL MULTICAST_JOIN
        MULTICAST_ERROR ADDR_CHANGE TIMEWAIT_EXIT""",
}

#: Those with values of their own.
VALUED: dict[type[enum.IntEnum | enum.IntFlag], dict[str, int]] = {
    Access: {"LOCAL_WRITE": 1, "REMOTE_WRITE": 1 << 1, "REMOTE_READ": 1 << 2, "REMOTE_ATOMIC": 1 << 3},
    SendFlags: {"FENCE": 1, "SIGNALED": 1 << 1, "SOLICITED": 1 << 2, "INLINE": 1 << 3},
    WCFlags: {"GRH": 1, "WITH_IMM": 1 << 1, "WITH_INV": 1 << 3},
    WCOpcode: {
        "SEND": 0, "RDMA_WRITE": 1, "RDMA_READ": 2, "COMP_SWAP": 3, "FETCH_ADD": 4, "BIND_MW": 5,
        "LOCAL_INV": 6,
        "RECV": 1 << 7, "RECV_RDMA_WITH_IMM": (1 << 7) + 1,
    },
    RejectReason: {"INVALID_SERVICE_ID": 8, "STALE_CONNECTION": 10, "CONSUMER_DEFINED": 28},
}  # fmt: skip


@pytest.mark.parametrize("kind", COUNTED, ids=lambda kind: kind.__name__)
def test_counted(kind: type[enum.IntEnum]) -> None:
    """Names and values are the header's."""
    assert {member.name: member.value for member in kind} == {
        name: number for number, name in enumerate(COUNTED[kind].split())
    }


@pytest.mark.parametrize("kind", VALUED, ids=lambda kind: kind.__name__)
def test_valued(kind: type[enum.IntEnum | enum.IntFlag]) -> None:
    """Names and values are the header's."""
    assert {member.name: member.value for member in kind} == VALUED[kind]


def test_all_are_tested() -> None:
    """No enumeration is left out above."""
    assert {kind.__name__ for kind in (*COUNTED, *VALUED)} == set(enums.__all__)


def test_receives_are_told_by_a_bit() -> None:
    """As in verbs, a completion of a receive is one whose opcode has bit 7."""
    assert [opcode for opcode in WCOpcode if opcode & WCOpcode.RECV] == [
        WCOpcode.RECV, WCOpcode.RECV_RDMA_WITH_IMM,
    ]  # fmt: skip
