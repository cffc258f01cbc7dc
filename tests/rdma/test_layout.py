"""Structs of librdmacm and libibverbs, against the headers that are installed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from aiordma.drivers.verbs import rdmacm

#: What C calls the struct, and its fields where they have other names there.
STRUCTS: Final[dict[type[ctypes.Structure], tuple[str, dict[str, str]]]] = {
    rdmacm.IbvGlobalRoute: ("struct ibv_global_route", {}),
    rdmacm.IbvAHAttr: ("struct ibv_ah_attr", {}),
    rdmacm.IbvQPCap: ("struct ibv_qp_cap", {}),
    rdmacm.IbvQPAttr: ("struct ibv_qp_attr", {}),
    rdmacm.IbvDeviceAttr: ("struct ibv_device_attr", {}),
    rdmacm.IbvDevice: ("struct ibv_device", {}),
    rdmacm.IbvContext: ("struct ibv_context", {}),
    rdmacm.CMEventChannel: ("struct rdma_event_channel", {}),
    rdmacm.CMConnParam: ("struct rdma_conn_param", {}),
    rdmacm.CMEventStruct: ("struct rdma_cm_event", {"conn": "param.conn"}),
    rdmacm.CMID: (
        "struct rdma_cm_id",
        {"src_addr": "route.addr.src_addr", "dst_addr": "route.addr.dst_addr"},
    ),
}
#: Structs that librdmacm or libibverbs write whole, or are given by value: their size must be right too.
WHOLE: Final = {
    rdmacm.IbvGlobalRoute,
    rdmacm.IbvAHAttr,
    rdmacm.IbvQPCap,
    rdmacm.IbvQPAttr,
    rdmacm.IbvDeviceAttr,
    rdmacm.CMEventChannel,
    rdmacm.CMConnParam,
}


def layout_here(struct: type[ctypes.Structure]) -> dict[str, int]:
    """Give the offsets, and the size, that ctypes gives a struct."""
    fields: list[Any] = list(struct._fields_)
    offsets = {name: getattr(struct, name).offset for name, *_ in fields if not name.startswith("_")}
    return {**offsets, **({"sizeof": ctypes.sizeof(struct)} if struct in WHOLE else {})}


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_layout_is_the_headers(struct: type[ctypes.Structure], tmp_path: Path) -> None:
    """Every field is where the compiler has it."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not Path("/usr/include/rdma/rdma_cma.h").exists():
        pytest.skip("no C compiler, or no <rdma/rdma_cma.h>: apt install gcc librdmacm-dev libibverbs-dev")
    c_name, names = STRUCTS[struct]
    here = layout_here(struct)
    values = [
        f"sizeof({c_name})" if name == "sizeof" else f"offsetof({c_name}, {names.get(name, name)})" for name in here
    ]
    lines = "".join(f'printf("%zu\\n", {value});' for value in values)
    source = tmp_path / "layout.c"
    source.write_text(
        f"#include <stddef.h>\n#include <stdio.h>\n#include <rdma/rdma_cma.h>\nint main(void) {{ {lines} return 0; }}\n"
    )
    program = tmp_path / "layout"
    subprocess.run([compiler, "-o", program, source], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert dict(zip(here, map(int, printed.split()), strict=True)) == here
