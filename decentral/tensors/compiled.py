"""Machine code for loops that numpy and torch cannot express: bit streams, entropy coding, selection inside a chunk.

Compiled by numba on first use and cached beside the source, or in the user's cache folder. The functions release the
GIL. They check no bounds of their own accord: whoever feeds them a peer's bytes checks every index in the loop, and
the fuzzers run them with ``NUMBA_BOUNDSCHECK=1``. Nor do they raise on a division by zero, which gives Inf or NaN as in
torch: a check in every lap would cost the vector instructions.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
from llvmlite import ir
from numba.extending import intrinsic

__all__ = ["compiled", "first_bit", "float32_at", "prefetch", "which_reach"]

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


# ---- instructions that no loop becomes ----
#
# Of LLVM, for any processor that it knows.

_BIT, _BYTE, _WORD = ir.IntType(1), ir.IntType(8), ir.IntType(32)
_WORDS_64 = ir.VectorType(_WORD, 64)


@intrinsic
def which_reach(_, bits, at, least):  # type: ignore[no-untyped-def]
    """A bit for each of the 64 floats from ``at`` on, given as their ``bits`` (uint32), whose magnitude, as bits too,
    is ``least`` or more; the lowest for the first. Nobody checks that there are 64.
    """

    def code(context, builder, signature, given):  # type: ignore[no-untyped-def]
        loaded = builder.load(builder.bitcast(_address(context, builder, signature, given), _WORDS_64.as_pointer()))
        loaded.align = 4
        size = builder.and_(loaded, ir.Constant(_WORDS_64, [0x7FFFFFFF] * 64))
        one = builder.insert_element(ir.Constant(_WORDS_64, ir.Undefined), given[2], ir.Constant(_WORD, 0))
        all_ = builder.shuffle_vector(one, ir.Constant(_WORDS_64, ir.Undefined), ir.Constant(_WORDS_64, [0] * 64))
        return builder.bitcast(builder.icmp_unsigned(">=", size, all_), ir.IntType(64))

    return numba.types.uint64(bits, numba.types.uint64, numba.types.uint32), code


@intrinsic
def first_bit(_, word):  # type: ignore[no-untyped-def]
    """The place of the lowest bit that is set in a uint64; 64: none is."""

    def code(context, builder, signature, given):  # type: ignore[no-untyped-def]
        return builder.cttz(given[0], ir.Constant(_BIT, 0))

    return numba.types.uint64(numba.types.uint64), code


@intrinsic
def prefetch(_, array, at):  # type: ignore[no-untyped-def]
    """Have the line of memory of an element on its way to the cache; there need be no such element."""

    def code(context, builder, signature, given):  # type: ignore[no-untyped-def]
        where = builder.bitcast(_address(context, builder, signature, given), _BYTE.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [where.type, _WORD, _WORD, _WORD])
        call = builder.module.declare_intrinsic("llvm.prefetch", [where.type], kind)
        builder.call(call, [where, *(ir.Constant(_WORD, number) for number in (0, 3, 1))])  # to be read, kept, data
        return context.get_dummy_value()

    return numba.types.void(array, numba.types.uint64), code


def _address(context: Any, builder: Any, signature: Any, given: Any) -> Any:  # Any: numba's, which has no types
    """The address of an element: the first argument is the array, the second its place."""
    array = context.make_array(signature.args[0])(context, builder, given[0])
    return builder.gep(array.data, [given[1]])
