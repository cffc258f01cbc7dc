"""Entry point of the `aiordma` command. It imports without extras, and says which one is missing."""

from __future__ import annotations

import importlib.util
import sys

import aiordma

__all__ = ["main"]


def main() -> None:
    """Run the `aiordma` command, and end the process with its exit status.

    An error of aiordma's own is one line: it says what happened and what to do next.
    """
    if any(importlib.util.find_spec(package) is None for package in ("click", "rich")):
        sys.exit("aiordma: this command needs an extra: pip install 'aiordma[tools]'")
    from aiordma.tools.cli import cli  # noqa: PLC0415 - imports click

    try:
        cli(prog_name="aiordma")
    except aiordma.RDMAError as error:
        sys.exit(f"aiordma: {error}")
