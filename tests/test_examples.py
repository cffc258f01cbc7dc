"""The examples, run as a reader would."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PYTHON = [sys.executable, "-u", "-W", "error"]


def run(name: str, *arguments: str) -> list[str]:
    """Run an example; gives the lines it printed."""
    done = subprocess.run(
        [*PYTHON, f"examples/{name}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_echo_in_one_run() -> None:
    """Each message comes back, the empty one too."""
    assert run("echo.py") == [
        "server: connection from 127.0.0.1 on device soft",
        "client: sent 'hello', got 'hello'",
        "client: sent '', got ''",
        "client: sent 'RDMA RDMA RDMA ', got 'RDMA RDMA RDMA '",
    ]


def test_echo_in_two_processes() -> None:
    """Server and client find each other by the command lines in the docstring."""
    command = [*PYTHON, "examples/echo.py", "serve", "127.0.0.1", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().removeprefix("server: port ").strip()
            lines = run("echo.py", "send", "127.0.0.1", port, "hello", "world")
        finally:
            server.terminate()
    assert lines == ["client: sent 'hello', got 'hello'", "client: sent 'world', got 'world'"]


def test_echo_explains_itself() -> None:
    """Arguments that fit nothing get the usage."""
    done = subprocess.run(
        [*PYTHON, "examples/echo.py", "what"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert done.returncode == 1
    assert "python examples/echo.py serve" in done.stderr


def test_cache() -> None:
    """What was put by message is got by READ, and the 201st version of an entry is the last."""
    assert run("cache.py") == [
        "get answer: (1, b'42')",
        "get question: None",
        f"get n: (201, {b'99' * 32!r})",
    ]


def test_work_queue() -> None:
    """Every task is done once (the example asserts that), and every worker had some."""
    (line,) = run("work_queue.py")
    assert line.startswith("500 of 500 tasks done, each by one of 4 workers: [")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_is_short_and_self_contained(path: Path) -> None:
    """An example has fewer than 80 lines, and imports only the standard library and aiordma itself."""
    source = path.read_text()
    assert len(source.splitlines()) < 80
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        assert all(name == "aiordma" or name in sys.stdlib_module_names for name in names)


def test_all_are_run_here() -> None:
    """An example that is added gets a test."""
    assert [path.name for path in EXAMPLES] == ["cache.py", "echo.py", "work_queue.py"]
