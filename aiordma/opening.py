"""What `connect`, `listen` and `serve` return: it can be awaited, and it can be entered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["Opening"]


class _Enterable(Protocol):
    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


T = TypeVar("T", bound=_Enterable)


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

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._opened is not None
        await self._opened.__aexit__(exc_type, exc, traceback)
