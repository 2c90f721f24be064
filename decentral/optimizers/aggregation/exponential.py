"""e to a power, with the same bits on every machine: the exponential of C's library differs in its last digits."""

__all__ = ["exp"]

_HALVINGS = 10
_TERMS = 16  # |x| / 1024 is below 0.7: the seventeenth is below 1e-16 of the sum


def exp(power: float) -> float:
    """About 12 digits of it, for powers up to 0; 0 below -700. Products and sums of float64, in one order."""
    if power < -700.0:
        return 0.0
    small, term, total = power / (1 << _HALVINGS), 1.0, 1.0
    for n in range(1, _TERMS + 1):
        term = term * small / n
        total += term
    for _ in range(_HALVINGS):
        total *= total
    return total
