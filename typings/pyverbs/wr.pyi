from collections.abc import Sequence

class SGE:
    addr: int
    length: int
    lkey: int
    def __init__(self, addr: int, length: int, lkey: int) -> None: ...
    def close(self) -> None: ...

class RecvWR:
    wr_id: int
    num_sge: int
    def __init__(
        self, wr_id: int = 0, num_sge: int = 0, sg: Sequence[SGE] | None = None, next_wr: RecvWR | None = None
    ) -> None: ...
    def close(self) -> None: ...

class SendWR:
    wr_id: int
    opcode: int
    num_sge: int
    send_flags: int
    imm_data: int
    next_wr: SendWR | None
    sg_list: SGE
    def __init__(
        self,
        wr_id: int = 0,
        opcode: int = 2,
        num_sge: int = 0,
        imm_data: int = 0,
        sg: Sequence[SGE] | None = None,
        send_flags: int = 2,
        next_wr: SendWR | None = None,
    ) -> None: ...
    def set_wr_rdma(self, rkey: int, addr: int) -> None: ...
    def set_wr_atomic(self, rkey: int, addr: int, compare_add: int, swap: int = 0) -> None: ...
    def close(self) -> None: ...
