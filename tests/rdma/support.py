"""The connection manager of the verbs driver at the seam, with queue pairs of raw pyverbs.

Tests in this folder need a kernel RDMA device, so `make test-rdma` runs them and `make test` doesn't. The device is
AIORDMA_TEST_DEVICE, and AIORDMA_TEST_HOST an address of it at which this process reaches itself.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, cast

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

from aiordma.drivers.base import CMEvent, DriverQP
from aiordma.drivers.verbs.cm import VerbsCMID
from aiordma.drivers.verbs.cm_channel import VerbsCMChannel
from aiordma.drivers.verbs.rdmacm import IbvQPAttr
from aiordma.enums import CMEventType, QPState
from aiordma.types import ConnParam

DEVICE: Final = os.environ.get("AIORDMA_TEST_DEVICE", "")
HOST: Final = os.environ.get("AIORDMA_TEST_HOST", "")
HOST6: Final = os.environ.get("AIORDMA_TEST_HOST6", "")
IWARP: Final = DEVICE.startswith("siw")

PARAM: Final = ConnParam(responder_resources=4, initiator_depth=3)


class RawQP:
    """A queue pair of pyverbs, with what the connection manager needs of it."""

    def __init__(self) -> None:

        self.context = Context(name=DEVICE)
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 16, None, None, 0)
        init = QPInitAttr(qp_type=2, scq=self.cq, rcq=self.cq, cap=QPCap(max_send_wr=4, max_recv_wr=4))
        self.qp = QP(self.pd, init)
        self.reason = ""
        #: The attributes it was changed by.
        self.modified: list[tuple[QPState, IbvQPAttr, int]] = []

    @property
    def qp_num(self) -> int:
        return int(self.qp.qp_num)

    @property
    def transport_is_iwarp(self) -> bool:
        return IWARP

    def hold(self, held: Callable[[], bool]) -> None:
        """Nothing: it is destroyed when its test is over."""

    def release(self) -> None:
        """Nothing."""

    def modify(self, attr: IbvQPAttr, mask: int) -> None:

        new = QPAttr()
        for name, bit in (
            ("qp_state", 1 << 0), ("qp_access_flags", 1 << 3), ("pkey_index", 1 << 4), ("port_num", 1 << 5),
            ("path_mtu", 1 << 8), ("timeout", 1 << 9), ("retry_cnt", 1 << 10), ("rnr_retry", 1 << 11),
            ("rq_psn", 1 << 12), ("max_rd_atomic", 1 << 13), ("min_rnr_timer", 1 << 15), ("sq_psn", 1 << 16),
            ("max_dest_rd_atomic", 1 << 17), ("dest_qp_num", 1 << 20),
        ):  # fmt: skip
            if mask & bit:
                setattr(new, name, getattr(attr, name))
        if mask & 1 << 7:
            grh = attr.ah_attr.grh
            raw = bytes(grh.dgid)
            gid = ":".join(raw[index : index + 2].hex() for index in range(0, 16, 2))
            route = GlobalRoute(
                dgid=GID(gid), sgid_index=grh.sgid_index, flow_label=grh.flow_label, hop_limit=grh.hop_limit,
                traffic_class=grh.traffic_class,
            )  # fmt: skip
            ah = attr.ah_attr
            new.ah_attr = AHAttr(
                gr=route, is_global=ah.is_global, port_num=ah.port_num, dlid=ah.dlid, sl=ah.sl,
                src_path_bits=ah.src_path_bits, static_rate=ah.static_rate,
            )  # fmt: skip
        self.qp.modify(new, mask)
        self.modified.append((QPState(attr.qp_state), attr, mask))

    def set_disconnected(self, reason: str) -> None:
        self.reason = reason

    def state(self) -> QPState:
        attr, _ = self.qp.query(1)
        return QPState(attr.qp_state)

    def attr(self) -> Any:
        attr, _ = self.qp.query((1 << 21) - 1)
        return attr

    def close(self) -> None:
        self.qp.close()
        self.cq.close()
        self.pd.close()
        self.context.close()


class CM:
    """An event channel whose events are awaited by identifier."""

    def __init__(self) -> None:
        self.channel = VerbsCMChannel(asyncio.get_running_loop(), self._on_event)
        self._queues: dict[VerbsCMID, asyncio.Queue[CMEvent]] = {}
        self._qps: list[RawQP] = []

    def _on_event(self, event: CMEvent) -> None:
        self.queue(event.listen_id or event.id).put_nowait(event)

    def queue(self, cm_id: Any) -> asyncio.Queue[CMEvent]:
        return self._queues.setdefault(cm_id, asyncio.Queue())

    async def next(self, cm_id: VerbsCMID, kind: CMEventType | None = None) -> CMEvent:
        """Give the next event of an identifier, which is of this kind."""
        event = await self.queue(cm_id).get()
        assert kind is None or event.event == kind, event
        return event

    def qp(self) -> RawQP:
        qp = RawQP()
        self._qps.append(qp)
        return qp

    def listen(self, backlog: int = 16, host: str = HOST, port: int = 0) -> VerbsCMID:
        listener = self.channel.create_id()
        listener.bind_addr((host, port))
        listener.listen(backlog)
        return listener

    async def resolved(self, port: int, host: str = HOST) -> VerbsCMID:
        """Make an identifier whose next step is to connect."""
        cm_id = self.channel.create_id()
        cm_id.resolve_addr(None, (host, port), 2.0)
        await self.next(cm_id, CMEventType.ADDR_RESOLVED)
        cm_id.resolve_route(2.0)
        await self.next(cm_id, CMEventType.ROUTE_RESOLVED)
        return cm_id

    async def requested(
        self, listener: VerbsCMID, private_data: bytes = b"", param: ConnParam = PARAM
    ) -> tuple[VerbsCMID, VerbsCMID, CMEvent]:
        """Send a request: gives the client, the server's identifier, and the event it came with."""
        client = await self.resolved(listener.local_addr[1])
        client.connect(driver(self.qp()), param, private_data)
        request = await self.next(listener, CMEventType.CONNECT_REQUEST)
        return client, cast("VerbsCMID", request.id), request

    def close(self) -> None:
        for qp in self._qps:
            qp.close()
        self.channel.close()


async def _first() -> None:
    async with connection_manager() as cm:
        await cm.resolved(1)


def driver(qp: RawQP) -> DriverQP:
    """Pass it off as a queue pair of the seam: the connection manager posts nothing."""
    return cast("DriverQP", qp)


@asynccontextmanager
async def connection_manager() -> AsyncIterator[CM]:
    """Open an event channel, and destroy what is left of it."""
    cm = CM()
    try:
        yield cm
    finally:
        cm.close()


# librdmacm opens a device when it meets it first, and keeps it open: those descriptors aren't any test's.
asyncio.run(_first())
