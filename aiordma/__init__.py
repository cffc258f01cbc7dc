"""RDMA for asyncio: one-sided reads and writes, atomics and messages, awaited.

Over InfiniBand, RoCE or iWARP; where a machine has no RDMA, over a software device of aiordma's own.
"""

from aiordma.batch import Batch
from aiordma.binding import Endpoint
from aiordma.cm import CMID
from aiordma.completion import CompletionQueue
from aiordma.connection import Connection
from aiordma.connector import connect
from aiordma.device import AsyncEvent, Context, ProtectionDomain, devices, open_device
from aiordma.enums import (
    Access,
    AsyncEventType,
    CMEventType,
    Opcode,
    QPState,
    RejectReason,
    SendFlags,
    WCFlags,
    WCOpcode,
    WCStatus,
)
from aiordma.errors import (
    AddressError,
    BrokenError,
    BusyError,
    ClosedError,
    CompletionError,
    ConnectError,
    ConnectTimeoutError,
    DeviceError,
    FlushedError,
    LocalError,
    ProtocolError,
    RDMAError,
    RejectedError,
    RemoteCallError,
    RemoteError,
    RetryExceededError,
    RNRError,
    RouteError,
    UnreachableError,
    UnsupportedError,
)
from aiordma.inbox import Message
from aiordma.listener import ConnectRequest, Listener, listen
from aiordma.memory import MemoryPool, MemoryRegion, MemorySlice
from aiordma.messages import MessageChannel, MessageParam, connect_messages, serve_calls, serve_messages
from aiordma.queue_pair import QueuePair
from aiordma.server import Server, serve
from aiordma.stream.client import create_connection, open_connection
from aiordma.stream.server import StreamServer, create_server, start_server
from aiordma.stream.socket import StreamParam
from aiordma.stream.tls import start_tls
from aiordma.stream.transport import StreamTransport
from aiordma.types import (
    SGE,
    Capabilities,
    ConnParam,
    DeviceInfo,
    GIDEntry,
    PortAttr,
    QPAddress,
    RecvWR,
    RemoteRegion,
    SendWR,
)

__version__ = "0.1.0"

__all__ = [
    "CMID",
    "SGE",
    "Access",
    "AddressError",
    "AsyncEvent",
    "AsyncEventType",
    "Batch",
    "BrokenError",
    "BusyError",
    "CMEventType",
    "Capabilities",
    "ClosedError",
    "CompletionError",
    "CompletionQueue",
    "ConnParam",
    "ConnectError",
    "ConnectRequest",
    "ConnectTimeoutError",
    "Connection",
    "Context",
    "DeviceError",
    "DeviceInfo",
    "Endpoint",
    "FlushedError",
    "GIDEntry",
    "Listener",
    "LocalError",
    "MemoryPool",
    "MemoryRegion",
    "MemorySlice",
    "Message",
    "MessageChannel",
    "MessageParam",
    "Opcode",
    "PortAttr",
    "ProtectionDomain",
    "ProtocolError",
    "QPAddress",
    "QPState",
    "QueuePair",
    "RDMAError",
    "RNRError",
    "RecvWR",
    "RejectReason",
    "RejectedError",
    "RemoteCallError",
    "RemoteError",
    "RemoteRegion",
    "RetryExceededError",
    "RouteError",
    "SendFlags",
    "SendWR",
    "Server",
    "StreamParam",
    "StreamServer",
    "StreamTransport",
    "UnreachableError",
    "UnsupportedError",
    "WCFlags",
    "WCOpcode",
    "WCStatus",
    "connect",
    "connect_messages",
    "create_connection",
    "create_server",
    "devices",
    "listen",
    "open_connection",
    "open_device",
    "serve",
    "serve_calls",
    "serve_messages",
    "start_server",
    "start_tls",
]
