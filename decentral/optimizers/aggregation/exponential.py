"""Exponential, cosine and powers with the same bits on every machine: those of C's library differ in their last digits.

Products and sums of float64, in one order.
"""

__all__ = ["cos", "exp", "power"]

_HALVINGS = 10
_TERMS = 16  # |x| / 1024 is below 0.7: the seventeenth is below 1e-16 of the sum


def exp(power: float) -> float:
    """e to a ``power`` up to 0, to about 12 digits; 0 below -700."""
    if power < -700.0:
        return 0.0
    small, term, total = power / (1 << _HALVINGS), 1.0, 1.0
    for n in range(1, _TERMS + 1):
        term = term * small / n
        total += term
    for _ in range(_HALVINGS):
        total *= total
    return total


def cos(angle: float) -> float:
    """The cosine of an angle between 0 and half a turn, to about 12 digits: its series, whose tail is below 1e-16."""
    square, term, total = angle * angle, 1.0, 1.0
    for n in range(1, _TERMS + 1):
        term = -term * square / ((2 * n - 1) * (2 * n))
        total += term
    return total


def power(base: float, times: int) -> float:
    """``base ** times`` for a whole number from 0, by squaring."""
    result, square = 1.0, base
    while times:
        result = result * square if times & 1 else result
        square, times = square * square, times >> 1
    return result
