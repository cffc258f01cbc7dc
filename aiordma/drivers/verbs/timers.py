"""Seconds as the codes of queue pair attributes (InfiniBand specification, volume 1, section 9.7)."""

from __future__ import annotations

from typing import Final

__all__ = ["ack_timeout_code", "rnr_timer_code"]

#: Hundredths of a millisecond of RNR NAK timer codes 1 to 31; code 0 is the longest.
_RNR: Final = (
    1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144,
    8192, 12_288, 16_384, 24_576, 32_768, 49_152,
)  # fmt: skip
_MAX_ACK_CODE: Final = 31
_ACK_UNIT: Final = 4.096e-6


def ack_timeout_code(seconds: float) -> int:
    """Give the local ACK timeout: 4.096 us times a power of two, rounded up; 2.4 hours at most."""
    for code in range(1, _MAX_ACK_CODE):
        if _ACK_UNIT * (1 << code) >= seconds * (1 - 1e-9):
            return code
    return _MAX_ACK_CODE


def rnr_timer_code(seconds: float) -> int:
    """Give the minimum RNR NAK timer, rounded up to what there is: 10 us to 655.36 ms."""
    for code, hundredths in enumerate(_RNR, start=1):
        if hundredths * 1e-5 >= seconds * (1 - 1e-9):
            return code
    return 0
