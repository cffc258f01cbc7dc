"""Structs of librdmacm and libibverbs, against the headers that are installed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from aiordma.drivers.verbs import structs

#: What C calls the struct, and its fields where they have other names there.
STRUCTS: Final[dict[type[ctypes.Structure], tuple[str, dict[str, str]]]] = {
    structs.IbvGlobalRoute: ("struct ibv_global_route", {}),
    structs.IbvAHAttr: ("struct ibv_ah_attr", {}),
    structs.IbvQPCap: ("struct ibv_qp_cap", {}),
    structs.IbvQPAttr: ("struct ibv_qp_attr", {}),
    structs.IbvDeviceAttr: ("struct ibv_device_attr", {}),
    structs.IbvDevice: ("struct ibv_device", {}),
    structs.IbvContext: ("struct ibv_context", {}),
    structs.CMEventChannel: ("struct rdma_event_channel", {}),
    structs.CMConnParam: ("struct rdma_conn_param", {}),
    structs.CMEventStruct: ("struct rdma_cm_event", {"conn": "param.conn"}),
    structs.CMID: (
        "struct rdma_cm_id",
        {"src_addr": "route.addr.src_addr", "dst_addr": "route.addr.dst_addr"},
    ),
}
#: Structs that librdmacm or libibverbs write whole, or are given by value: their size must be right too.
WHOLE: Final = {
    structs.IbvGlobalRoute,
    structs.IbvAHAttr,
    structs.IbvQPCap,
    structs.IbvQPAttr,
    structs.IbvDeviceAttr,
    structs.CMEventChannel,
    structs.CMConnParam,
}


def layout_here(struct: type[ctypes.Structure]) -> dict[str, int]:
    """Give the offsets, and the size, that ctypes gives a struct."""
    fields: list[Any] = list(struct._fields_)
    offsets = {name: getattr(struct, name).offset for name, *_ in fields if not name.startswith("_")}
    return {**offsets, **({"sizeof": ctypes.sizeof(struct)} if struct in WHOLE else {})}


def test_layouts_are_the_headers(tmp_path: Path) -> None:
    """Every field of every struct is where the compiler has it."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    headers = (Path("/usr/include/stdio.h"), Path("/usr/include/rdma/rdma_cma.h"))
    if compiler is None or not all(header.exists() for header in headers):
        pytest.skip("no C compiler, or no headers: apt install gcc libc6-dev librdmacm-dev libibverbs-dev")
    here: dict[str, int] = {}
    for struct, (c_name, names) in STRUCTS.items():
        for name, value in layout_here(struct).items():
            field = names.get(name, name)
            here[f"sizeof({c_name})" if name == "sizeof" else f"offsetof({c_name}, {field})"] = value
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    lines = "\n".join(f'printf("%zu\\n", {expression});' for expression in here)
    includes = "".join(f"#include <{name}>\n" for name in ("stddef.h", "stdio.h", "rdma/rdma_cma.h"))
    source.write_text(f"{includes}int main(void) {{\n{lines}\nreturn 0; }}\n")
    subprocess.run([compiler, "-o", program, source], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert dict(zip(here, map(int, printed.split()), strict=True)) == here
