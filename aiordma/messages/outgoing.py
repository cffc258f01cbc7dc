"""What is being sent: its bytes, or its memory lent to the peer, and the future of whoever sends it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

from aiordma.domain import ProtectionDomain
from aiordma.enums import Access
from aiordma.errors import RDMAError
from aiordma.local_memory import LOCAL, Memory
from aiordma.memory import MemoryRegion, as_bytes
from aiordma.messages.protocol import MAX_PIECES, Kind, Outgoing
from aiordma.types import Buffer, RemoteRegion

__all__ = ["Data", "Sending"]

#: What a message can be given as.
Data: TypeAlias = Memory | Buffer | Sequence[Memory | Buffer]

_Piece: TypeAlias = "bytes | memoryview | Memory"


def _piece(data: Any) -> _Piece:
    if isinstance(data, (bytes, *LOCAL)):
        return data
    return as_bytes(data)


def _view(piece: _Piece) -> bytes | memoryview:
    return piece.view if isinstance(piece, LOCAL) else piece


class Sending(Outgoing):
    """A message on its way out.

    Attributes:
        future: of the sender.
    """

    __slots__ = ("_lent", "_pd", "_pieces", "future")

    def __init__(
        self, pd: ProtectionDomain, kind: Kind, ident: int, data: Data, max_small: int, future: asyncio.Future[None]
    ) -> None:
        parts: list[_Piece] = [_piece(part) for part in data] if isinstance(data, (list, tuple)) else [_piece(data)]
        parts = [part for part in parts if len(part)]
        length = sum([len(part) for part in parts])
        large = length > max_small
        if large and len(parts) > MAX_PIECES:
            parts = [b"".join([_view(part) for part in parts])]
        super().__init__(kind, ident, length, len(parts) if large else 0)
        self._pd = pd
        self._pieces = parts
        self._lent: list[MemoryRegion] = []
        self.future = future

    def withdrawn(self) -> bool:
        """Whether the sender cancelled it."""
        return self.future.cancelled()

    def content(self) -> bytes:
        """Give a small message's bytes."""
        return b"".join([_view(piece) for piece in self._pieces])

    def lend(self) -> list[RemoteRegion] | None:
        """Register a large message's memory, as far as it isn't registered for READs already."""
        regions = []
        try:
            for piece in self._pieces:
                if isinstance(piece, LOCAL) and self._is_readable(piece.region):
                    regions.append(piece.remote())
                    continue
                own = self._pd.register(_view(piece), access=Access.REMOTE_READ)
                self._lent.append(own)
                regions.append(own.remote())
        except (OSError, RDMAError) as error:
            self.fail(error)
            return None
        return regions

    def _is_readable(self, region: MemoryRegion) -> bool:
        return bool(region.access & Access.REMOTE_READ) and region.pd is self._pd and not region.closed

    def finish(self) -> None:
        """Let go of the memory, and tell the sender."""
        self._release()
        if not self.future.done():
            self.future.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Let go of the memory, and tell the sender that the message may not have arrived."""
        self._release()
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # there may be thousands; the next call and the close say it again

    def _release(self) -> None:
        lent, self._lent = self._lent, []
        for region in lent:
            region.deregister()
        self._pieces = []
