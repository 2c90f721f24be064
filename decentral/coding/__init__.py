"""Arrays to the fewest bytes, and back: what a part's elements are decides how they are packed or entropy coded."""

from decentral.coding.streams import (
    PREFIX_NBYTES,
    ElementKind,
    Floats,
    Form,
    Made,
    Rising,
    Symbols,
    decode,
    encode,
    raw_nbytes,
)

__all__ = [
    "PREFIX_NBYTES",
    "ElementKind",
    "Floats",
    "Form",
    "Made",
    "Rising",
    "Symbols",
    "decode",
    "encode",
    "raw_nbytes",
]
