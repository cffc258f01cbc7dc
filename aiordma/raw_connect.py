"""Connecting a queue pair without rdma_cm: the two programs exchange addresses on a way of their own.

perftest's way, and that of containers without the connection manager's device. InfiniBand and RoCE only: an iWARP
connection is a TCP connection and its handshake.
"""

from __future__ import annotations

import secrets
from typing import Final

from aiordma.drivers.base import DriverContext, DriverQP
from aiordma.errors import RDMAError, UnsupportedError
from aiordma.types import ConnParam, GIDEntry, QPAddress, QPPath

__all__ = ["RawConnect"]

#: Seconds until a packet is sent again, where none are asked for: 4.096 us times 2 to the 14th, perftest's.
_ACK_TIMEOUT: Final = 4.096e-6 * 2**14


class RawConnect:
    """What a queue pair that isn't connected yet offers beside rdma_cm."""

    driver: DriverQP
    qp_num: int
    transport: str
    closed: bool
    peer: object
    _context: DriverContext
    _param: ConnParam
    #: This side's, once the program asked for it: address, port, and index of its GID.
    _local: tuple[QPAddress, int, int | None] | None = None

    def unusable(self) -> RDMAError:
        """Make the exception that says why nothing can be done with it."""
        raise NotImplementedError

    def local_address(
        self, *, gid: GIDEntry | None = None, port_num: int = 1, psn: int | None = None, mtu: int | None = None
    ) -> QPAddress:
        """Give the address that the peer's `connect_to()` needs: send it there, by whatever way you have.

        Args:
            gid: of this side: `Context.gid_for(address)`, or an entry of `Context.query_gids()`. RoCE needs one;
                InfiniBand within a subnet doesn't.
            port_num: of the device.
            psn: number of the first packet; by default a random one.
            mtu: bytes of a packet's payload at most; by default the port's.

        Raises:
            UnsupportedError: an iWARP device, the soft device included.
            ValueError: RoCE without a GID; a number out of its range.
        """
        self._check_raw()
        port = self._context.query_port(port_num)
        if gid is None and (self.transport == "roce" or not port.lid):
            raise ValueError(f"{self._context.name} is reached by a GID only: pass gid=context.gid_for(address)")
        address = QPAddress(
            qpn=self.qp_num,
            psn=secrets.randbelow(1 << 24) if psn is None else psn,
            lid=port.lid,
            gid=bytes(16) if gid is None else gid.gid,
            mtu=mtu or port.active_mtu,
        )
        self._local = address, port_num, None if gid is None else gid.index
        return address

    def connect_to(
        self,
        remote: QPAddress,
        *,
        param: ConnParam | None = None,
        service_level: int = 0,
        hop_limit: int = 64,
    ) -> None:
        """Connect to the queue pair that has this address (ibv_modify_qp to RTR and to RTS), after `local_address()`.

        It returns at once, and its success proves nothing about the peer: exchange a message outside before the first
        request, since one that arrives before the peer's `connect_to()` is dropped, and sent again after a time-out
        only. Post the first receives before it. The end isn't told to the peer: its next request fails.

        Args:
            remote: the peer's, made by its `local_address()`.
            param: its depths, retries, timers and `tos` count; by default what the queue pair was made with. Without an
                `ack_timeout` it is 67 ms.
            service_level: of InfiniBand.
            hop_limit: routers on the way.

        Raises:
            UnsupportedError: an iWARP device, the soft device included.
            ValueError: `local_address()` wasn't called before; or an argument is out of its range.
            DeviceError: the device refuses; the queue pair can only be closed then.
        """
        self._check_raw()
        if self._local is None:
            raise ValueError("call local_address() first: the peer must know this side's first packet number")
        if not 0 <= service_level <= 15 or not 0 <= hop_limit <= 255:
            raise ValueError(f"service_level {service_level} is 0 to 15, hop_limit {hop_limit} is 0 to 255")
        local, port_num, gid_index = self._local
        param = param or self._param
        limits = self._context.capabilities
        path = QPPath(
            port_num=port_num, gid_index=gid_index, psn=local.psn, mtu=min(local.mtu, remote.mtu),
            responder_resources=_at_most(param.responder_resources, limits.max_responder_resources),
            initiator_depth=_at_most(param.initiator_depth, limits.max_initiator_depth),
            ack_timeout=param.ack_timeout or _ACK_TIMEOUT, rnr_timer=param.rnr_timer,
            retry_count=param.retry_count, rnr_retry=param.rnr_retry,
            service_level=service_level, traffic_class=param.tos or 0, hop_limit=hop_limit,
        )  # fmt: skip
        self.driver.connect_raw(remote, path)
        self.peer = f"QP {remote.qpn} at {GIDEntry(index=0, gid=remote.gid, kind='ib').address or remote.lid}"

    def _check_raw(self) -> None:
        if self.closed:
            raise self.unusable()
        if self.transport == "iwarp":
            raise UnsupportedError(
                f"device {self._context.name} is iWARP: its queue pairs are connected by connect() and listen() only; "
                "InfiniBand and RoCE devices can do without"
            )


def _at_most(asked: int | None, limit: int) -> int:
    return limit if asked is None else min(asked, limit)
