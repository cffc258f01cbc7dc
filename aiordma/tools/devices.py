"""`aiordma devices`: what is here, and for what is not, the one line that says what to install."""

from __future__ import annotations

import json

import attrs
import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

import aiordma

__all__ = ["command"]


@click.command("devices")
@click.option("--json", "as_json", is_flag=True, help="One JSON list, for programs.")
def command(*, as_json: bool) -> None:
    """What devices are here, and what to install for those that are not."""
    found = aiordma.devices()
    if as_json:
        click.echo(json.dumps([attrs.asdict(device) for device in found], indent=2))
        return
    console = Console(highlight=False)
    here = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("device", "driver", "transport", "what it is"):
        here.add_column(title, no_wrap=title in {"device", "driver"})
    for device in found:
        if device.available:
            name = Text(device.name, "bold green")
            here.add_row(name, device.driver, Text(device.transport), Text(device.detail))
    console.print(here)
    for device in found:
        if not device.available:
            # Never wrapped: the hint may be a command to copy.
            what = f"{device.transport} ({device.driver}): {device.detail or 'not available'}"
            console.print(Text.assemble("\n", ("not here", "bold yellow"), f"  {what}"), soft_wrap=True)
            console.print(Text.assemble("          ", (device.hint, "bold")), soft_wrap=True)
