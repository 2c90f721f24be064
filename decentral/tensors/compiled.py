"""Machine code for loops that numpy and torch cannot express: bit streams, entropy coding, selection inside a chunk.

Compiled by numba on first use and cached beside the source, or in the user's cache folder. The functions release the
GIL. They check no bounds of their own accord: whoever feeds them a peer's bytes checks every index in the loop, and
the fuzzers run them with ``NUMBA_BOUNDSCHECK=1``. Nor do they raise on a division by zero, which gives Inf or NaN as in
torch: a check in every lap would cost the vector instructions.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.extending import intrinsic

__all__ = ["compiled", "float32_at"]

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function as machine code; cached where a cache can be written, compiled anew where it cannot."""
    decorate: Any = numba.njit
    try:
        made = decorate(function, nogil=True, error_model="numpy", cache=True)
    except RuntimeError:  # numba found no folder to write to
        made = decorate(function, nogil=True, error_model="numpy")
    return cast(Callable[P, R], made)


@intrinsic
def _pointer(_, address):  # type: ignore[no-untyped-def]
    def code(context, builder, signature, given):  # type: ignore[no-untyped-def]
        return builder.inttoptr(given[0], context.get_value_type(signature.return_type))

    return numba.types.CPointer(numba.types.float32)(numba.types.uintp), code


@compiled
def float32_at(address, size):  # type: ignore[no-untyped-def]
    """So many float32 that lie at an address (uintp), as an array, for compiled loops. Nobody checks that they do."""
    return numba.carray(_pointer(address), size)
