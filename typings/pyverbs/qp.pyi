from pyverbs.addr import AHAttr
from pyverbs.cq import CQ
from pyverbs.pd import PD
from pyverbs.wr import RecvWR, SendWR

class QPCap:
    max_send_wr: int
    max_recv_wr: int
    max_send_sge: int
    max_recv_sge: int
    max_inline_data: int
    def __init__(
        self,
        max_send_wr: int = 1,
        max_recv_wr: int = 10,
        max_send_sge: int = 1,
        max_recv_sge: int = 1,
        max_inline_data: int = 0,
    ) -> None: ...

class QPInitAttr:
    cap: QPCap
    def __init__(self, *, qp_type: int, scq: CQ, rcq: CQ, cap: QPCap, sq_sig_all: int = 1) -> None: ...

class QPAttr:
    qp_state: int
    cur_qp_state: int
    path_mtu: int
    path_mig_state: int
    qkey: int
    rq_psn: int
    sq_psn: int
    dest_qp_num: int
    qp_access_flags: int
    ah_attr: AHAttr
    pkey_index: int
    max_rd_atomic: int
    max_dest_rd_atomic: int
    min_rnr_timer: int
    port_num: int
    timeout: int
    retry_cnt: int
    rnr_retry: int
    def __init__(self, qp_state: int = 1, cur_qp_state: int = 0, port_num: int = 1, path_mtu: int = 3) -> None: ...

class QP:
    qp_num: int
    def __init__(self, creator: PD, init_attr: QPInitAttr, qp_attr: QPAttr | None = None) -> None: ...
    def modify(self, qp_attr: QPAttr, comp_mask: int) -> None: ...
    def query(self, attr_mask: int) -> tuple[QPAttr, QPInitAttr]: ...
    def post_send(self, wr: SendWR, bad_wr: SendWR | None = None) -> None: ...
    def post_recv(self, wr: RecvWR, bad_wr: RecvWR | None = None) -> None: ...
    def close(self) -> None: ...
