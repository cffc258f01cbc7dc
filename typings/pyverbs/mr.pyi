from pyverbs.pd import PD

class MR:
    lkey: int
    rkey: int
    def __init__(self, creator: PD, length: int = 0, access: int = 0, address: int | None = None) -> None: ...
    def close(self) -> None: ...
