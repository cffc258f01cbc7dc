"""The command group. A command is a module of this package with a `command` in it, imported when it runs."""

from __future__ import annotations

import importlib
from typing import Final

import click

import aiordma

__all__ = ["cli"]

#: Each command with its line in the help, which is read far more often than any one command runs.
COMMANDS: Final = {
    "demo": "A server and a client in two processes, and what an awaited operation costs.",
    "devices": "What devices are here, and what to install for those that are not.",
    "ping": "Pings by RDMA, with rping or itself at the other end.",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"aiordma.tools.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(aiordma.__version__, prog_name="aiordma", message="%(prog)s %(version)s")
def cli() -> None:
    """RDMA for asyncio."""
