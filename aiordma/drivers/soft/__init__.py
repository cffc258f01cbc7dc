"""The soft device: an RNIC in the process that speaks iWARP over ordinary TCP.

`mpa`, `ddp`, `rdmap` and `endpoint` are the protocol, without I/O and without a clock; `rnic` and `link` join it to sockets and the
event loop, `cm` sets connections up.
"""
