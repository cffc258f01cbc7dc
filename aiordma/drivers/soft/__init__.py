"""The soft device: an RNIC in the process that speaks iWARP over ordinary TCP.

The protocol, without I/O and without a clock: `mpa` (start-up, CRC, markers), `ddp` (headers), `stag` (registered
memory), `outbox`, `send_queue`, `receive_queue`, `responder`, `runs`, and `endpoint`, which puts them together.
`link` and `rnic` join it to sockets and the event loop, `cm` sets connections up, `driver` is the seam's end.
"""
