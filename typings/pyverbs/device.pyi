class DeviceAttr:
    vendor_id: int
    max_qp_wr: int
    max_sge: int
    max_sge_rd: int
    max_cqe: int
    max_qp_rd_atom: int
    max_qp_init_rd_atom: int
    atomic_caps: int

class PortAttr:
    state: int
    max_mtu: int
    active_mtu: int
    gid_tbl_len: int
    max_msg_sz: int
    lid: int
    link_layer: int

class GIDEntry:
    gid_index: int
    port_num: int
    gid_type: int
    def gid_str(self) -> str: ...

class AsyncEvent:
    event_type: int
    def ack(self) -> None: ...

class Context:
    def __init__(self, *, name: str) -> None: ...
    def query_device(self) -> DeviceAttr: ...
    def query_port(self, port_num: int) -> PortAttr: ...
    def query_gid_table(self, max_entries: int, flags: int = 0) -> list[GIDEntry]: ...
    def get_async_event(self) -> AsyncEvent: ...
    def close(self) -> None: ...
