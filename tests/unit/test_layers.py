"""Imports go strictly downward: the floors of the house, read off the source.

Each function takes the package as a mapping from module name to source, so that the tests of the tests can
build a house with a fault in it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import aiordma

#: From the ground up: a module may import from floors below its own, and on its own floor as long as that
#: makes no circle. A name stands for its submodules too, "" for the package's public face.
FLOORS = (
    ("enums", "errors", "types"),
    ("drivers",),
    (
        "cm",
        "completion",
        "device",
        "domain",
        "keep_alive",
        "local_memory",
        "memory",
        "queue_pair",
        "raw_connect",
        "recv_ledger",
        "send_ledger",
        "slots",
        "spinning",
        "write_buffer",
    ),
    ("batch", "binding", "connection", "connector", "inbox", "listener", "opening", "server"),
    ("messages", "stream"),
    ("",),
    ("nvme", "testing", "tools"),
    ("__main__",),
)
#: What of the socket module names and numbers are, rather than sockets.
SOCKET_NAMES = {"AddressFamily", "SocketKind", "gaierror", "getaddrinfo", "herror", "if_nameindex"}


class Import(NamedTuple):
    """One imported module or name of a module, and where."""

    importer: str
    line: int
    imported: str
    #: Not for annotations only.
    at_run_time: bool

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}: imports {self.imported}"


def _package() -> dict[str, str]:
    root = Path(aiordma.__file__).parent
    sources = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return sources


def _is_package(module: str, sources: Mapping[str, str]) -> bool:
    return any(other.startswith(f"{module}.") for other in sources)


def _imports(sources: Mapping[str, str]) -> Iterator[Import]:
    """List every import of every module, wherever in it it stands, with relative ones resolved."""
    for module, source in sources.items():
        tree = ast.parse(source)
        for_annotations = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for child in node.body
            for inner in ast.walk(child)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = module.split(".")
                    above = above[: len(above) - node.level + _is_package(module, sources)]
                    base = ".".join([*above, *([base] if base else [])])
                names = [
                    name if (name := f"{base}.{alias.name}") in sources or base not in sources else base
                    for alias in node.names
                ]
            else:
                continue
            for name in names:
                yield Import(module, node.lineno, name, node not in for_annotations)


def _floor(module: str) -> int:
    name = module.removeprefix("aiordma").removeprefix(".")
    for number, names in enumerate(FLOORS):
        if any(name == known or (known and name.startswith(f"{known}.")) for known in names):
            return number
    raise LookupError(f"{module} is on no floor: give it one in FLOORS")


def _inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _upward(sources: Mapping[str, str]) -> list[str]:
    return [
        str(item)
        for item in _imports(sources)
        if _inside(item.imported, "aiordma") and _floor(item.imported) > _floor(item.importer)
    ]


def _circle(sources: Mapping[str, str]) -> list[str]:
    graph: dict[str, set[str]] = {module: set() for module in sources}
    for item in _imports(sources):
        if item.at_run_time and item.imported in sources and item.imported != item.importer:
            graph[item.importer].add(item.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _through_the_seam(sources: Mapping[str, str]) -> list[str]:
    """List imports of a driver from above the seam, except by `device`, and from one driver to another."""
    found = []
    for item in _imports(sources):
        if not item.imported.startswith("aiordma.drivers."):
            continue
        kind = item.imported.split(".")[2]
        allowed = ("aiordma.device", "aiordma.testing", f"aiordma.drivers.{kind}")
        if kind not in {"base", "watch"} and not any(_inside(item.importer, module) for module in allowed):
            found.append(str(item))
    return found


def _verbs_outside(sources: Mapping[str, str]) -> list[str]:
    return [
        str(item)
        for item in _imports(sources)
        if _inside(item.imported, "pyverbs") and not _inside(item.importer, "aiordma.drivers.verbs")
    ]


def _sockets_outside(sources: Mapping[str, str]) -> list[str]:
    """List what is done with sockets outside of the drivers; resolving names, with their constants, isn't."""
    found = []
    for module, source in sources.items():
        # The demo and the tools measure TCP to compare with.
        if _inside(module, "aiordma.drivers") or _inside(module, "aiordma.tools"):
            continue
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Attribute(value=ast.Name(id="socket"), attr=name):
                    allowed = name in SOCKET_NAMES or name.isupper()
                case ast.Attribute(attr=name):
                    allowed = not name.startswith("sock_")
                case ast.ImportFrom(module="socket", names=aliases):
                    name = ", ".join(alias.name for alias in aliases)
                    allowed = all(alias.name in SOCKET_NAMES or alias.name.isupper() for alias in aliases)
                case ast.Import(names=aliases):
                    name = ", ".join(alias.name for alias in aliases)
                    allowed = not any(alias.name in {"_socket", "select"} for alias in aliases)
                case _:
                    continue
            if not allowed:
                found.append(f"{module}, line {node.lineno}: uses {name}")
    return found


def test_imports_go_downward() -> None:
    """No module imports from a floor above its own, not even for annotations, and each module has a floor."""
    sources = _package()
    assert len(sources) > 20, "the source wasn't found"
    assert all(_floor(module) >= 0 for module in sources)
    assert _upward(sources) == []


def test_no_circle() -> None:
    """No modules import each other in a circle, annotations aside."""
    assert _circle(_package()) == []


def test_only_device_names_a_driver() -> None:
    """Above the seam everything goes through `drivers.base`; `device` alone knows which drivers there are."""
    assert _through_the_seam(_package()) == []


def test_pyverbs_stays_in_its_driver() -> None:
    """Only `aiordma.drivers.verbs` imports pyverbs."""
    assert _verbs_outside(_package()) == []


def test_sockets_stay_in_drivers() -> None:
    """Above the seam nothing makes, reads or writes a socket."""
    assert _sockets_outside(_package()) == []


HOUSE = {
    "aiordma": "from aiordma.connection import Connection",
    "aiordma.enums": "",
    "aiordma.errors": "from aiordma.enums import WCStatus",
    "aiordma.drivers": "",
    "aiordma.drivers.base": "from aiordma.errors import RDMAError",
    "aiordma.drivers.soft": "",
    "aiordma.drivers.soft.link": "import socket\nfrom aiordma.drivers.soft import ddp\nsocket.socket()",
    "aiordma.drivers.soft.ddp": "from ...errors import RDMAError",
    "aiordma.drivers.verbs": "import pyverbs.pd",
    "aiordma.device": "from aiordma.drivers.soft.link import Link\nfrom aiordma.drivers import base",
    "aiordma.connection": "import asyncio\nimport socket\nfrom .device import Context\nsocket.SOCK_STREAM",
    "aiordma.tools": "",
    "aiordma.tools.main": "import aiordma",
}


def test_sound_house_passes() -> None:
    """The house that the next tests damage has no fault."""
    checks = (_upward, _circle, _through_the_seam, _verbs_outside, _sockets_outside)
    assert [check(HOUSE) for check in checks] == [[]] * len(checks)


@pytest.mark.parametrize(
    "source",
    [
        "import aiordma.connection",
        "import aiordma",
        "from aiordma.connection import Connection",
        "from aiordma import connection",
        "from aiordma import Connection",
        "from ...connection import Connection",
        "from ... import connection",
        "def late():\n    from aiordma.connection import Connection",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from aiordma.connection import Connection",
    ],
)
def test_upward_import_is_found(source: str) -> None:
    """An upward import is found however it is written."""
    (found,) = _upward({**HOUSE, "aiordma.drivers.soft.ddp": source})
    assert found.startswith("aiordma.drivers.soft.ddp, line ")


def test_module_without_floor_is_found() -> None:
    """A new module must be given a floor."""
    with pytest.raises(LookupError, match=r"aiordma\.attic is on no floor"):
        _upward({**HOUSE, "aiordma.tools.main": "import aiordma.attic"})


def test_circle_is_found() -> None:
    """A circle on one floor is found; one for annotations only is none."""
    circle = "from aiordma.drivers.soft.link import Link"
    assert "aiordma.drivers.soft.ddp" in _circle({**HOUSE, "aiordma.drivers.soft.ddp": circle})
    annotated = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {circle}"
    assert _circle({**HOUSE, "aiordma.drivers.soft.ddp": annotated}) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("aiordma.connection", "from aiordma.drivers.soft.link import Link"),
        ("aiordma.connection", "from aiordma.drivers import soft"),
        ("aiordma.drivers.soft.ddp", "from aiordma.drivers import verbs"),
    ],
)
def test_way_round_the_seam_is_found(module: str, source: str) -> None:
    """A driver named from above the seam, or by another driver, is found."""
    assert len(_through_the_seam({**HOUSE, module: source})) == 1


@pytest.mark.parametrize("source", ["import pyverbs", "from pyverbs.qp import QP", "import pyverbs.cq as cq"])
def test_pyverbs_elsewhere_is_found(source: str) -> None:
    """Pyverbs imported outside of its driver is found."""
    assert len(_verbs_outside({**HOUSE, "aiordma.connection": source})) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import socket\nsocket.socketpair()",
        "from socket import create_connection",
        "async def read(loop, sock):\n    await loop.sock_recv(sock, 1)",
        "import select",
    ],
)
def test_socket_elsewhere_is_found(source: str) -> None:
    """A socket that is made or used above the seam is found."""
    assert len(_sockets_outside({**HOUSE, "aiordma.connection": source})) == 1
