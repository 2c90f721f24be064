"""The shapes that every law of a compressor goes through, all within one test.

A test for each were 10,500, and took 40 % longer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

SHAPES = [
    (),
    (1,),
    (0,),
    (3, 0),
    (13,),
    (4095,),
    (4096,),
    (4097,),
    (64, 64),
    (1, 5000),
    (67, 131),
    (128, 65),
    (3, 5, 7, 11),
    (2, 3, 4099),
]


def for_every_shape(law: Callable[..., None]) -> Callable[..., None]:
    """A test without the argument ``shape`` that tries ``law`` with each of SHAPES; the note of an error names it."""

    @functools.wraps(law)
    def tried(**given: object) -> None:
        for shape in SHAPES:
            try:
                law(**given, shape=shape)
            except BaseException as error:
                error.add_note(f"shape: {shape}")
                raise

    asked = inspect.signature(law)
    others = [argument for name, argument in asked.parameters.items() if name != "shape"]
    tried.__signature__ = asked.replace(parameters=others)  # type: ignore[attr-defined]  # what pytest looks at
    return tried
