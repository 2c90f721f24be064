"""Kinds of values that a manifest holds: their bounds are checked before anything is made of them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints


def _canonical_spaces(spelling: str) -> str:
    """One spelling for what differs in spaces only: as ``str(compressor)`` writes it."""
    return re.sub(r"\s", "", spelling).replace(">>", " >> ").replace(",", ", ")


Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]  # safe as a folder's name
Salt = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]{0,64}$")]
Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._:/-]{0,127}$")]
TextDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Spelling = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_(),.=>+ -]{1,256}$"),
    AfterValidator(_canonical_spaces),
]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Size = Annotated[int, Field(ge=1, le=2**20)]
Steps = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PartShare = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(gt=0, le=30 * 86400)]
