class GID:
    def __init__(self, val: str | None = None) -> None: ...
    @property
    def gid(self) -> str: ...

class GlobalRoute:
    def __init__(
        self, dgid: GID, flow_label: int = 0, sgid_index: int = 0, hop_limit: int = 1, traffic_class: int = 0
    ) -> None: ...

class AHAttr:
    def __init__(
        self,
        dlid: int = 0,
        sl: int = 0,
        src_path_bits: int = 0,
        static_rate: int = 0,
        is_global: int = 0,
        port_num: int = 1,
        gr: GlobalRoute | None = None,
    ) -> None: ...
