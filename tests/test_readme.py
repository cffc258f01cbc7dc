"""The Python in README.md and docs/, run and type-checked.

A block is a whole program, unless a comment before it says otherwise: a `fragment` is the inside of a
coroutine that has the names the guide introduces, a `sketch` is only compiled.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

import aiordma
from aiordma import Access
from aiordma.errors import STATUS_TABLE
from aiordma.testing import connected_pair

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:^<!-- (fragment|sketch) -->\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: What stands around a fragment.
FRAGMENT = """\
import asyncio
import sys

import aiordma


async def fragment(
    conn: aiordma.Connection,
    peer: aiordma.Connection,
    region: aiordma.MemoryRegion,
    remote: aiordma.RemoteRegion,
    port: int,
) -> None:
"""


@frozen
class Block:
    name: str
    kind: str
    code: str

    @property
    def module(self) -> str:
        """The code as a module: of a fragment, with what stands around it."""
        return FRAGMENT + textwrap.indent(self.code, "    ") if self.kind == "fragment" else self.code


def find() -> Iterator[Block]:
    """Find the blocks of all pages."""
    for page in PAGES:
        text = page.read_text()
        for found in BLOCK.finditer(text):
            line = text.count("\n", 0, found.start(2)) + 1
            yield Block(f"{page.stem}_{line}", found[1] or "program", found[2])


BLOCKS = list(find())
PROGRAMS = [block for block in BLOCKS if block.kind == "program"]
FRAGMENTS = [block for block in BLOCKS if block.kind == "fragment"]


def name(block: Block) -> str:
    """Name a block in a test's id."""
    return block.name


def run(block: Block) -> str:
    """Run a program; gives what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block.code],
        cwd=ROOT, capture_output=True, text=True, timeout=40, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_readme_program_prints_what_it_says() -> None:
    """The README has one program, and what it prints is below it."""
    (program,) = [block for block in BLOCKS if block.name.startswith("README")]
    said = (ROOT / "README.md").read_text().partition("It prints\n\n")[2].partition("\n\n")[0]
    assert run(program) == textwrap.dedent(said) + "\n"


@pytest.mark.parametrize("block", [block for block in PROGRAMS if block.name[:6] != "README"], ids=name)
def test_program(block: Block) -> None:
    """A program in the docs runs, without a warning."""
    assert run(block)


@pytest.mark.parametrize("block", FRAGMENTS, ids=name)
async def test_fragment(block: Block) -> None:
    """A fragment runs on a connection."""

    async def receive(conn: aiordma.Connection) -> None:
        async for _ in conn:
            pass

    namespace: dict[str, Any] = {}
    exec(compile(block.module, block.name, "exec"), namespace)
    async with aiordma.serve(receive, "127.0.0.1") as server, connected_pair() as pair:
        access = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
        async with pair.server.pd.alloc(64 * 1024, access=access) as region:
            await namespace["fragment"](pair.client, pair.server, region, region.remote(), server.port)


def test_all_compile() -> None:
    """Every block is Python, sketches too."""
    for block in BLOCKS:
        ast.parse(block.module, block.name)


def test_types(tmp_path: Path) -> None:
    """Programs and fragments pass mypy's strict mode."""
    for block in PROGRAMS + FRAGMENTS:
        (tmp_path / f"{block.name}.py").write_text(block.module)
    done = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--follow-imports=silent",
            *sorted(tmp_path.glob("*.py")),
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    """Links within the repository lead to a file, and to a heading that is there."""
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https:"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_status_table() -> None:
    """docs/errors.md has each unsuccessful status, with its exception and its hint."""
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.*) \|$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert rows == [(status.name, row.error.__name__, row.hint) for status, row in STATUS_TABLE.items()]


def test_exception_tree() -> None:
    """docs/errors.md has every public exception, each under its base."""
    text = (ROOT / "docs" / "errors.md").read_text()
    tree = text.partition("```text\n")[2].partition("```")[0]
    stack: list[tuple[int, type]] = [(-1, Exception)]
    seen = set()
    for line in tree.splitlines():
        indent = len(line) - len(line.lstrip())
        found = getattr(aiordma, line.split()[0])
        while stack[-1][0] >= indent:
            stack.pop()
        assert stack[-1][1] in found.__bases__, line
        stack.append((indent, found))
        seen.add(found)
    public = {getattr(aiordma, exported) for exported in aiordma.__all__}
    assert seen == {value for value in public if isinstance(value, type) and issubclass(value, Exception)}
