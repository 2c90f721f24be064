"""Python's floats rounded to float32: what a weight is multiplied with, said once and the same on every machine."""

import struct

__all__ = ["float32"]


def float32(value: float) -> float:
    """The nearest float32. OverflowError beyond its range."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
