"""[swarm.redundancy]: whether peers keep for each other, in memory, what each of them alone has."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from decentral.manifest.table import Table
from decentral.manifest.values import Count, Seconds

Keepers = Annotated[int, Field(ge=1, le=32)]


class Redundancy(Table):
    """What a peer's disk alone had, its inner optimizer's state above all, is kept in pieces in others' memory."""

    keepers: Keepers = Field(default=3, description="other members that keep a piece each of a peer's own state")
    needed: Keepers = Field(default=2, description="pieces that give it back; each is that part of the state long")
    seconds: Seconds = Field(default=600.0, description="between two of a peer's states that are given, at least")
    megabytes: Count = Field(default=1024, description="of memory for the pieces of all others, on each peer, at most")

    @model_validator(mode="after")
    def _can_be_joined(self) -> Redundancy:
        if self.needed > self.keepers:
            raise ValueError(
                f"needed = {self.needed} is above keepers = {self.keepers}: that many pieces there never are; lower it"
            )
        return self

    @property
    def nbytes(self) -> int:
        """Memory for the pieces of all others."""
        return 1_000_000 * self.megabytes
