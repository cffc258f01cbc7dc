"""Byte streams: rsocket's wire protocol, and asyncio's transports over it."""
