"""The `aiordma` command, as far as it needs no connection."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import sys
from importlib.machinery import ModuleSpec

import pytest
from click.testing import CliRunner

import aiordma
from aiordma.tools.cli import COMMANDS, cli
from aiordma.tools.main import main

NOWHERE = aiordma.DeviceInfo(
    name="rdma",
    driver="verbs",
    transport="RoCE",
    available=False,
    detail="no pyverbs",
    hint="apt install a-package-whose-name-is-longer-than-the-terminal's-line  # [not markup]",
)


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_missing_extra(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Without click or rich the command ends with the one line that installs them."""
    find_spec = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == missing else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == "aiordma: this command needs an extra: pip install 'aiordma[tools]'"


def test_devices() -> None:
    """`aiordma devices` names every device that is here, and tells of those that aren't what to do."""
    output = CliRunner().invoke(cli, ["devices"], catch_exceptions=False).output
    for device in aiordma.devices():
        assert (device.name if device.available else device.hint) in output


def test_devices_hint_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint is printed on one line however narrow the terminal, and as it is."""
    monkeypatch.setattr(aiordma, "devices", lambda: [NOWHERE])
    monkeypatch.setitem(os.environ, "COLUMNS", "40")
    output = CliRunner().invoke(cli, ["devices"], catch_exceptions=False).output
    assert NOWHERE.hint in [line.strip() for line in output.splitlines()]


def test_devices_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """`aiordma devices --json` is what the library returns, for programs."""
    monkeypatch.setattr(aiordma, "devices", lambda: [NOWHERE])
    output = CliRunner().invoke(cli, ["devices", "--json"], catch_exceptions=False).output
    assert [aiordma.DeviceInfo(**device) for device in json.loads(output)] == [NOWHERE]


@pytest.mark.parametrize("name", COMMANDS)
def test_command_is_there(name: str) -> None:
    """Each command that the help lists can be imported, and has help of its own."""
    result = CliRunner().invoke(cli, [name, "--help"], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: cli {name} ")


def test_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of aiordma's own ends the command with its text, not with a traceback."""

    def fail() -> None:
        raise aiordma.RDMAError("no luck; try again")

    monkeypatch.setattr(aiordma, "devices", fail)
    monkeypatch.setattr(sys, "argv", ["aiordma", "devices"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == "aiordma: no luck; try again"


def test_python_dash_m(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m aiordma` is the command."""
    monkeypatch.setattr(sys, "argv", ["aiordma", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("aiordma", run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out == f"aiordma {aiordma.__version__}\n"
