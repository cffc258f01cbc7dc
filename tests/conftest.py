"""Runs coroutine tests on asyncio's loop and on uvloop, and checks after each that nothing is left.

Left: a task, a file descriptor, a call of the loop's exception handler that the test didn't expect. Warnings are errors
by pyproject.toml. `PYTHONASYNCIODEBUG=1` and `-X dev` reach the loops; `AIORDMA_TEST_EAGER=1` makes tasks eager on
asyncio's own loop (Python 3.12 and newer).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from aiordma.cm import CMID
from aiordma.device import loop_state, rdma_driver

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


# What a shell starts in the background ignores SIGINT, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


async def _open_what_stays_open() -> None:
    """Have librdmacm meet the devices: it opens each when it meets it first, and keeps it."""
    driver = rdma_driver()
    if driver is None:
        return
    for device in driver.list_devices():
        for address in device.addresses:
            with contextlib.suppress(OSError):  # what can't be used stays closed, too
                cm_id = CMID(loop_state(), driver)
                try:
                    cm_id.bind_addr((address, 0))
                finally:
                    cm_id.destroy()


# libuv opens its signal pipe once per process, and keeps it too: none of this is any test's.
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as _first:
    _first.run(_open_what_stays_open())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spare the collections after each test what pytest itself holds: they take half the time then."""
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each coroutine test on both loops."""
    if inspect.iscoroutinefunction(metafunc.function):
        metafunc.fixturenames.insert(0, "loop_kind")
        metafunc.parametrize("loop_kind", list(LOOPS))


def _open_fds() -> dict[str, str]:
    fds = {}
    for fd in Path("/proc/self/fd").iterdir():
        try:
            fds[fd.name] = str(fd.readlink())
        except OSError:  # the listing's own
            continue
    return fds


class LoopErrors(list[dict[str, Any]]):
    """Contexts that the loop's exception handler was called with; a test that expects some takes them out."""


@pytest.fixture
def loop_errors() -> LoopErrors:
    """What the loop's exception handler gets during this test. What is left in it at the end fails the test."""
    return LoopErrors()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    errors = next((value for value in arguments.values() if isinstance(value, LoopErrors)), LoopErrors())
    gc.collect()
    before = _open_fds()
    with asyncio.Runner(loop_factory=LOOPS[str(pyfuncitem.callspec.params["loop_kind"])]) as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        if os.environ.get("AIORDMA_TEST_EAGER") and sys.version_info >= (3, 12):
            loop.set_task_factory(asyncio.eager_task_factory)
        left = runner.run(_run(pyfuncitem.obj, arguments, 5 / 6 * float(pyfuncitem.config.getini("timeout"))))
    gc.collect()
    after = {fd: name for fd, name in _open_fds().items() if before.get(fd) != name}
    assert not left, f"tasks left: {left}"
    assert not errors, f"the loop's exception handler was called: {list(errors)}"
    assert not after, f"file descriptors left: {after}"
    return True


async def _run(test: Callable[..., Any], arguments: dict[str, Any], limit: float) -> list[str]:
    """Run a test, let its last callbacks run, and give the tasks that are left."""
    # pytest-timeout's signal doesn't get through to a uvloop that waits.
    async with asyncio.timeout(limit):
        await test(**arguments)
    for _ in range(10):
        await asyncio.sleep(0)
    return [repr(task) for task in asyncio.all_tasks() if task is not asyncio.current_task()]
