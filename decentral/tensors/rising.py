"""Whether rows of indices rise strictly within bounds: one pass over them, and no copy."""
# Shape suffixes: C = rows, k = indices of a row.

from torch import Tensor

from decentral.tensors.compiled import compiled

__all__ = ["is_rising"]


def is_rising(index_Ck: Tensor, limit: int) -> bool:
    """True when every row rises strictly within ``[0, limit)``. One device sync."""
    if not index_Ck.numel():
        return True
    if index_Ck.device.type == "cpu":
        return bool(_is_rising(index_Ck.numpy(), limit))
    inside = ((index_Ck[:, 0] >= 0) & (index_Ck[:, -1] < limit)).all()  # first and last, when they rise
    return bool(inside & (index_Ck[:, 1:] > index_Ck[:, :-1]).all())


@compiled
def _is_rising(index, limit):  # type: ignore[no-untyped-def]
    rows, columns = index.shape
    falls = 0
    for r in range(rows):
        row = index[r]
        falls += (row[0] < 0) + (row[columns - 1] >= limit)
        for c in range(1, columns):
            falls += row[c] <= row[c - 1]
    return falls == 0
