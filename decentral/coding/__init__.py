"""Arrays to the fewest bytes, and back: what a part's elements are decides how they are packed or entropy coded."""

from decentral.coding.kinds import Floats, Kind, Rising, Symbols
from decentral.coding.streams import PREFIX_NBYTES, Form, decode, encode, raw_nbytes

__all__ = ["PREFIX_NBYTES", "Floats", "Form", "Kind", "Rising", "Symbols", "decode", "encode", "raw_nbytes"]
