"""The drivers, the fake one too, have every member of the seam, with the same signature."""

from __future__ import annotations

import asyncio
import inspect
import typing
from typing import Any, Protocol

import pytest

from aiordma.drivers import base
from aiordma.drivers.soft.cm import SoftCMChannel, SoftCMID
from aiordma.drivers.soft.driver import SoftDriver
from aiordma.drivers.soft.rnic import SoftContext, SoftCQ, SoftPD, SoftQP
from aiordma.drivers.soft.stag import Region
from tests.unit.fake_driver import FakeContext, FakeCQ, FakeMR, FakePD, FakeQP

PROTOCOLS: dict[type, list[type]] = {
    base.Driver: [SoftDriver],
    base.DriverContext: [SoftContext, FakeContext],
    base.DriverPD: [SoftPD, FakePD],
    base.DriverMR: [Region, FakeMR],
    base.DriverCQ: [SoftCQ, FakeCQ],
    base.DriverQP: [SoftQP, FakeQP],
    base.DriverCMChannel: [SoftCMChannel],
    base.DriverCMID: [SoftCMID],
}
PAIRS = [(protocol, kind) for protocol, kinds in PROTOCOLS.items() for kind in kinds]


def members(protocol: type) -> list[str]:
    """Give the names that a protocol asks for."""
    return [name for name in vars(protocol) if not name.startswith("_")]


def test_every_protocol_is_tested() -> None:
    """No protocol of the seam is left out above."""
    found = {
        kind for name, kind in vars(base).items()
        if inspect.isclass(kind) and Protocol in kind.__bases__ and kind.__module__ == base.__name__
    }  # fmt: skip
    assert found == set(PROTOCOLS)
    assert all(members(protocol) for protocol in PROTOCOLS)


@pytest.mark.parametrize(
    ("protocol", "kind", "name"),
    [(p, k, name) for p, k in PAIRS for name in members(p) if not isinstance(vars(p)[name], property)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_method(protocol: type, kind: type, name: str) -> None:
    """A method takes what the seam passes: the same names, kinds and defaults; what it adds is optional."""
    asked = list(inspect.signature(vars(protocol)[name]).parameters.values())
    offered = list(inspect.signature(getattr(kind, name)).parameters.values())
    for wanted, had in zip(asked, offered, strict=False):
        assert (wanted.name, wanted.kind, wanted.default) == (had.name, had.kind, had.default)
    assert len(offered) >= len(asked)
    assert all(extra.default is not inspect.Parameter.empty for extra in offered[len(asked) :])
    assert not inspect.iscoroutinefunction(getattr(kind, name))


@pytest.mark.parametrize(
    ("protocol", "kind", "name"),
    [(p, k, name) for p, k in PAIRS for name in members(p)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_annotations(protocol: type, kind: type, name: str) -> None:
    """A result is what the seam says, or one of its kind."""
    wanted = _result(vars(protocol)[name], base)
    offered = getattr(kind, name, None)
    if offered is None or not (callable(offered) or isinstance(offered, property)):
        return  # an attribute; that it is there is the next test's claim
    had = _result(offered, inspect.getmodule(kind))
    if had == wanted or wanted is Any:
        return
    assert had in PROTOCOLS.get(wanted, []), (wanted, had)


def _result(member: Any, module: Any) -> Any:
    function = member.fget if isinstance(member, property) else member
    return typing.get_type_hints(function, vars(module)).get("return")


async def test_attributes_of_the_soft_device() -> None:
    """What the seam has as properties is there on the soft device's objects, with its type."""
    loop = asyncio.get_running_loop()
    driver = SoftDriver()
    context = driver.open("soft", loop)
    channel = driver.create_cm_channel(loop, print)
    cm_id = channel.create_id()
    pd = context.alloc_pd()
    cq = context.create_cq(10, lambda: None)
    qp = context.create_qp(pd, cq, cq, max_send_wr=1, max_recv_wr=1, max_sge=1)
    mr = pd.reg_mr(bytearray(8), 0x1000, 8, 1)
    objects: dict[type, Any] = {
        base.Driver: driver, base.DriverContext: context, base.DriverPD: pd, base.DriverMR: mr,
        base.DriverCQ: cq,
        base.DriverQP: qp, base.DriverCMChannel: channel, base.DriverCMID: cm_id,
    }  # fmt: skip
    assert set(objects) == set(PROTOCOLS)
    for protocol, made in objects.items():
        assert type(made) in PROTOCOLS[protocol]
        for name, member in vars(protocol).items():
            if isinstance(member, property):
                wanted = _result(member, base)
                value = getattr(made, name)
                origin = typing.get_origin(wanted)
                kinds = typing.get_args(wanted) if origin is not tuple else (tuple,)
                assert isinstance(value, tuple(kinds) or wanted), (protocol, name, value)
    mr.close()
    qp.close()
    cq.close()
    pd.close()
    cm_id.destroy()
    channel.close()
    context.close()


def statically() -> None:
    """Hold the classes against the protocols, for the type checker; never called."""
    driver: base.Driver = SoftDriver()
    loop = asyncio.new_event_loop()
    context: base.DriverContext = driver.open("soft", loop)
    fake: base.DriverContext = FakeContext()
    for either in (context, fake):
        pd: base.DriverPD = either.alloc_pd()
        cq: base.DriverCQ = either.create_cq(1, loop.stop)
        qp: base.DriverQP = either.create_qp(pd, cq, cq, max_send_wr=1, max_recv_wr=1, max_sge=1)
        qp.close()
    channel: base.DriverCMChannel = driver.create_cm_channel(loop, print)
    channel.close()
