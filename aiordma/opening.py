"""What `connect`, `listen` and `serve` return: it can be awaited, and it can be entered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["Opening"]


class _Closable(Protocol):
    async def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


class Opening(Generic[T]):
    """Something about to be opened. Awaited, it gives the open object; entered, it also closes it at the end."""

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        self._opened: T | None = None

    def __await__(self) -> Generator[Any, None, T]:
        return self._make().__await__()

    async def __aenter__(self) -> T:
        self._opened = await self._make()
        return self._opened

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._opened is not None
        await self._opened.close()
