"""Queue pairs: posts, and the moves between states that rdma_cm or the program asks for."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from aiordma.drivers.base import PostError
from aiordma.drivers.verbs.api import (
    GID,
    QP,
    AHAttr,
    GlobalRoute,
    PyverbsError,
    QPAttr,
    QPCap,
    QPInitAttr,
    error_number,
    verb,
)
from aiordma.drivers.verbs.completion_queue import VerbsCQ
from aiordma.drivers.verbs.rdmacm import IbvQPAttr
from aiordma.drivers.verbs.timers import ack_timeout_code, rnr_timer_code
from aiordma.drivers.verbs.work_requests import CHAIN_LENGTH, built, receive_of
from aiordma.enums import Access, QPState
from aiordma.errors import DeviceError, UnsupportedError
from aiordma.types import QPAddress, QPPath, RecvWR, RunWR, SendWR

if TYPE_CHECKING:
    from aiordma.drivers.verbs.context import VerbsContext, VerbsPD

__all__ = ["VerbsQP"]

_QPT_RC: Final = 2
#: enum ibv_qp_attr_mask, what of it is used here.
_STATE: Final = 1 << 0
_ACCESS: Final = 1 << 3
_PKEY_INDEX: Final = 1 << 4
_PORT: Final = 1 << 5
_AV: Final = 1 << 7
_PATH_MTU: Final = 1 << 8
_TIMEOUT: Final = 1 << 9
_RETRY_CNT: Final = 1 << 10
_RNR_RETRY: Final = 1 << 11
_RQ_PSN: Final = 1 << 12
_MAX_RD_ATOMIC: Final = 1 << 13
_MIN_RNR_TIMER: Final = 1 << 15
_SQ_PSN: Final = 1 << 16
_MAX_DEST_RD_ATOMIC: Final = 1 << 17
_DEST_QPN: Final = 1 << 20
_TO_INIT: Final = _STATE | _PKEY_INDEX | _PORT | _ACCESS
_TO_RTR: Final = _STATE | _AV | _PATH_MTU | _DEST_QPN | _RQ_PSN | _MAX_DEST_RD_ATOMIC | _MIN_RNR_TIMER
_TO_RTS: Final = _STATE | _TIMEOUT | _RETRY_CNT | _RNR_RETRY | _SQ_PSN | _MAX_RD_ATOMIC
#: What a peer may do to this side's memory is decided by each region's rights; the queue pair allows it all.
_ALL_ACCESS: Final = int(Access.REMOTE_READ | Access.REMOTE_WRITE)
#: What of struct ibv_qp_attr is copied, besides the address vector.
_FIELDS: Final = (
    "qp_state", "cur_qp_state", "path_mtu", "path_mig_state", "qkey", "rq_psn", "sq_psn", "dest_qp_num",
    "qp_access_flags", "pkey_index", "max_rd_atomic", "max_dest_rd_atomic", "min_rnr_timer", "port_num", "timeout",
    "retry_cnt", "rnr_retry",
)  # fmt: skip
#: enum ibv_mtu by bytes.
_MTU: Final = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}


class VerbsQP:
    """A reliable connected queue pair (ibv_qp), in INIT from the start: receives can be posted."""

    def __init__(self, context: VerbsContext, pd: VerbsPD, send_cq: VerbsCQ, recv_cq: VerbsCQ, cap: QPCap) -> None:
        self._context = context
        self._send_cq = send_cq
        self._recv_cq = recv_cq
        init = QPInitAttr(qp_type=_QPT_RC, scq=send_cq.cq, rcq=recv_cq.cq, cap=cap, sq_sig_all=0)
        with verb("ibv_create_qp", f"no queue pair of {cap.max_send_wr} send and {cap.max_recv_wr} receive requests"):
            self._qp = QP(pd.pd, init)
        self.qp_num: int = self._qp.qp_num
        self._chain = context.chain
        self._single = context.chain.single
        self._post: Callable[..., None] = self._qp.post_send
        self._access = _ALL_ACCESS | (Access.REMOTE_ATOMIC if context.capabilities.atomics else 0)
        self._closed = False
        self._state: QPState | None = None
        self._disconnected = False
        self._destroyed = False
        self._held: Callable[[], bool] | None = None
        self.reason = ""
        context.qps[self.qp_num] = self
        try:
            attr = QPAttr(qp_state=QPState.INIT, port_num=1)
            attr.qp_access_flags = self._access
            # siw takes no port, and has no partitions.
            self._modify(attr, _STATE | _ACCESS if self.transport_is_iwarp else _TO_INIT)
        except BaseException:
            self.close()
            raise

    @property
    def transport_is_iwarp(self) -> bool:
        """Whether its device speaks iWARP."""
        return self._context.capabilities.transport == "iwarp"

    @property
    def failed(self) -> bool:
        """Whether it is known to be in ERR."""
        return self._state is QPState.ERR

    @property
    def disconnected(self) -> bool:
        """Whether the peer disconnected in order."""
        return self._disconnected

    def set_disconnected(self, reason: str) -> None:
        """The connection manager reports that the peer disconnected in order."""
        self._disconnected = True
        self.reason = self.reason or reason

    @property
    def state(self) -> QPState:
        """Its state, asked of the device until it is ERR (ibv_query_qp)."""
        if self._state is not None:
            return self._state
        try:
            state = QPState(self._qp.query(_STATE)[0].qp_state)
        except PyverbsError:
            return QPState.ERR
        if state is QPState.ERR:
            self._state = state
        return state

    # -- posting ------------------------------------------------------------------------------------------------------

    def post_send(self, wrs: Sequence[SendWR]) -> bool:
        """Post (ibv_post_send). The device completes nothing within the call, as far as can be told."""
        if len(wrs) == 1 and len(wrs[0].sg_list) < 2:
            try:
                self._post(self._single(wrs[0]))
            except PyverbsError as error:
                raise self._refused(error, 0) from error
            return False
        self._post_list(wrs)
        return False

    def _post_list(self, wrs: Sequence[SendWR]) -> None:
        """Post a list in parts as long as the chain; those of several elements one by one."""
        start = 0
        while start < len(wrs):
            stop = start
            while stop < len(wrs) and stop - start < CHAIN_LENGTH and len(wrs[stop].sg_list) < 2:
                stop += 1
            if stop == start:
                self._post_built(wrs[start], start)
                start += 1
            else:
                self._post_part(wrs[start:stop], start)
                start = stop

    def _post_part(self, wrs: Sequence[SendWR], before: int) -> None:
        chain = self._chain
        try:
            self._post(chain.several(wrs), chain.bad)
        except PyverbsError as error:
            bad = chain.bad.wr_id
            taken = next((index for index, wr in enumerate(wrs) if wr.wr_id == bad), 0)
            raise self._refused(error, before + taken) from error

    def _post_built(self, wr: SendWR, before: int) -> None:
        request = built(wr, siw=self._chain.siw)
        try:
            self._post(request)
        except PyverbsError as error:
            raise self._refused(error, before) from error
        finally:
            request.close()

    def post_run(self, run: RunWR) -> bool:
        """Post a run as the list it stands for; a READ's completion each, as each has a future of its own."""
        chain = self._chain
        for start in range(0, run.count, CHAIN_LENGTH):
            count = min(CHAIN_LENGTH, run.count - start)
            try:
                self._post(chain.run(run, start, count), chain.bad)
            except PyverbsError as error:
                taken = run.count - 1 - (run.wr_id - chain.bad.wr_id) // 2
                raise self._refused(error, taken) from error
        return False

    def _refused(self, error: PyverbsError, posted: int, name: str = "ibv_post_send") -> PostError:
        """Make the exception of a post that the device refused after the first `posted` requests."""
        number = error_number(error)
        hint = (
            "a request has more elements, or more inline data, than the queue pair takes"
            if number == errno.EINVAL
            else ""
        )
        if number == errno.ENOMEM:
            hint = "the queue is full"
        text = f"QP {self.qp_num} in {self.state.name}: {os.strerror(number)}"
        return PostError(number, text, posted=posted, verb=name, hint=hint)

    def _refuse_closed(self, *_: object) -> None:
        raise PostError(errno.EINVAL, f"QP {self.qp_num} is closed", posted=0)

    def post_recv(self, wrs: Sequence[RecvWR]) -> bool:
        """Post receives (ibv_post_recv), one by one: pyverbs can link them, but not unlink."""
        if self._closed:
            self._refuse_closed()
        for index, wr in enumerate(wrs):
            try:
                self._qp.post_recv(receive_of(wr))
            except PyverbsError as error:
                raise self._refused(error, index, "ibv_post_recv") from error
        return False

    # -- states -------------------------------------------------------------------------------------------------------

    def modify(self, attr: IbvQPAttr, mask: int) -> None:
        """Change attributes as the connection manager has them (ibv_modify_qp), with this driver's access rights."""
        copied = QPAttr()
        for field in _FIELDS:
            setattr(copied, field, getattr(attr, field))
        if mask & _ACCESS:
            copied.qp_access_flags = attr.qp_access_flags | self._access
        if mask & _AV:
            ah = attr.ah_attr
            copied.ah_attr = _address(
                port_num=ah.port_num, dlid=ah.dlid, sl=ah.sl, src_path_bits=ah.src_path_bits,
                static_rate=ah.static_rate, gid=bytes(ah.grh.dgid) if ah.is_global else None,
                sgid_index=ah.grh.sgid_index, flow_label=ah.grh.flow_label, hop_limit=ah.grh.hop_limit,
                traffic_class=ah.grh.traffic_class,
            )  # fmt: skip
        self._modify(copied, mask)

    def _modify(self, attr: QPAttr, mask: int) -> None:
        if self._closed:
            raise DeviceError(errno.EINVAL, f"QP {self.qp_num} is closed", verb="ibv_modify_qp")
        state = QPState(attr.qp_state).name
        with verb("ibv_modify_qp", f"QP {self.qp_num} doesn't go to {state}"):
            self._qp.modify(attr, mask)

    def connect_raw(self, remote: QPAddress, path: QPPath) -> None:
        """Move from INIT to RTR and RTS, without rdma_cm."""
        if self.transport_is_iwarp:
            raise UnsupportedError(f"{self._context.name} is iWARP: its queue pairs are connected by rdma_cm only")
        attr = QPAttr(qp_state=QPState.INIT, port_num=path.port_num)
        attr.qp_access_flags = self._access
        self._modify(attr, _TO_INIT)
        attr = QPAttr(qp_state=QPState.RTR, port_num=path.port_num)
        attr.dest_qp_num, attr.rq_psn, attr.path_mtu = remote.qpn, remote.psn, _MTU[path.mtu]
        attr.max_dest_rd_atomic, attr.min_rnr_timer = path.responder_resources, rnr_timer_code(path.rnr_timer)
        attr.ah_attr = _address(
            port_num=path.port_num, dlid=remote.lid, sl=path.service_level,
            gid=None if path.gid_index is None else remote.gid, sgid_index=path.gid_index or 0,
            hop_limit=path.hop_limit, traffic_class=path.traffic_class,
        )  # fmt: skip
        self._modify(attr, _TO_RTR)
        attr = QPAttr(qp_state=QPState.RTS, port_num=path.port_num)
        attr.sq_psn, attr.timeout, attr.retry_cnt = path.psn, ack_timeout_code(path.ack_timeout), path.retry_count
        attr.rnr_retry, attr.max_rd_atomic = path.rnr_retry, path.initiator_depth
        self._modify(attr, _TO_RTS)

    def to_error(self) -> None:
        """Move to ERR: everything posted completes, flushed. Idempotent."""
        if self._state is None and not self._closed:
            self._state = QPState.ERR
            # siw refuses where the kernel got there before, and so does a device that is gone.
            with contextlib.suppress(PyverbsError):
                self._qp.modify(QPAttr(qp_state=QPState.ERR), _STATE)

    def hold(self, held: Callable[[], bool]) -> None:
        """Take the question whether the connection manager holds it: while it does, ibv_destroy_qp would wait."""
        self._held = held

    def close(self) -> None:
        """Destroy (ibv_destroy_qp), now or in `release()`; completions that weren't polled are dropped. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._state = QPState.ERR
        self._post = self._refuse_closed  # pyverbs would post through a null pointer
        if self._held is None or not self._held():
            self.release()

    def release(self) -> None:
        """The connection manager doesn't hold it any more: destroy it if it is closed. Idempotent."""
        self._held = None
        if not self._closed or self._destroyed:
            return
        self._destroyed = True
        self._context.qps.pop(self.qp_num, None)
        with verb("ibv_destroy_qp", f"QP {self.qp_num} can't be destroyed"):
            self._qp.close()
        self._send_cq.purge(self.qp_num)
        if self._recv_cq is not self._send_cq:
            self._recv_cq.purge(self.qp_num)


def _address(
    *, port_num: int, dlid: int, sl: int, gid: bytes | None, sgid_index: int, hop_limit: int, traffic_class: int,
    flow_label: int = 0, src_path_bits: int = 0, static_rate: int = 0,
) -> AHAttr:  # fmt: skip
    """Make an address vector; `gid` only where it has a global route."""
    route = None
    if gid is not None:
        route = GlobalRoute(
            dgid=GID(gid.hex(":", 2)), flow_label=flow_label, sgid_index=sgid_index,
            hop_limit=hop_limit, traffic_class=traffic_class,
        )  # fmt: skip
    return AHAttr(
        dlid=dlid, sl=sl, src_path_bits=src_path_bits, static_rate=static_rate,
        is_global=int(route is not None), port_num=port_num, gr=route,
    )  # fmt: skip
