"""How an event loop watches a descriptor for a driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Protocol, TypeAlias

__all__ = ["unwatch", "watch_readable", "watch_writable"]


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


_File: TypeAlias = "int | _HasFileno"


def _fd(file: _File) -> int:
    return file if isinstance(file, int) else file.fileno()


def watch_readable(loop: asyncio.AbstractEventLoop, file: _File, callback: Callable[[], object]) -> None:
    """Call back whenever the file is readable, in an empty context.

    The loop keeps the context of whoever adds a reader, and all that is in it, as long as the reader.
    """
    Context().run(loop.add_reader, _fd(file), callback)


def watch_writable(loop: asyncio.AbstractEventLoop, file: _File, callback: Callable[[], object]) -> None:
    """Call back whenever the file is writable, in an empty context."""
    Context().run(loop.add_writer, _fd(file), callback)


def unwatch(loop: asyncio.AbstractEventLoop, file: _File) -> None:
    """Watch the file no more, if the loop is still there."""
    if not loop.is_closed():
        loop.remove_reader(_fd(file))
        loop.remove_writer(_fd(file))
