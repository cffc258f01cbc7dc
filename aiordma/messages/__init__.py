"""Whole messages of any size between two programs, and calls with replies, over an RDMA connection."""

from aiordma.messages.calls import CallHandler
from aiordma.messages.channel import MessageChannel
from aiordma.messages.establish import connect_messages, serve_calls, serve_messages
from aiordma.messages.outgoing import Data
from aiordma.messages.protocol import MessageParam

__all__ = [
    "CallHandler",
    "Data",
    "MessageChannel",
    "MessageParam",
    "connect_messages",
    "serve_calls",
    "serve_messages",
]
