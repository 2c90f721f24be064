"""What a manifest holds: one frozen table per subject, one description per key, which is also its comment in the file.

The digest covers the values only, not their order, their comments or the spelling of numbers; it is the run's id,
so peers that agree on the id agree on everything here. Crosses the wire as its TOML text, about 3 kB.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from decentral.manifest.checking import checked
from decentral.manifest.commented import to_toml
from decentral.manifest.outer_terms import Compression, Exchange, Outer
from decentral.manifest.redundancy import Redundancy
from decentral.manifest.table import Table, canonical
from decentral.manifest.training_terms import Data, Inner, Model
from decentral.manifest.values import Count, Positive, Salt, Seconds, Word

Digest = bytes

_DOMAIN = b"decentral manifest 1\n"


class Run(Table):
    """The run itself."""

    name: Word = Field(description="what people call the run: letters, digits, . _ -")
    salt: Salt = Field(default="", description="any word: two runs with equal terms and other salts are two runs")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=0, description="of the first weights and the data order"
    )
    rounds: Count = Field(default=100, description="outer steps after which the run is done")
    minutes: Positive | None = Field(
        default=None,
        description="the run also ends at the first commit after this time; unset: no limit",
        examples=[60.0],
    )


class Swarm(Table):
    """Who is there, and how long the others wait."""

    min_peers: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="members below which nothing is committed"
    )
    deadline_floor: Seconds = Field(default=2.0, description="seconds: least slack that late peers get")
    deadline_ceiling: Seconds = Field(
        default=60.0, description="seconds: longest wait for offers after a round's first"
    )
    lease: Seconds = Field(
        default=15.0, description="seconds without a sign of life after which a peer is not waited for"
    )
    shrink_after: Seconds = Field(
        default=60.0, description="seconds after which missing peers no longer count for majorities"
    )
    redundancy: Redundancy | None = Field(
        default=None,
        description="so many members keep, in memory, what a peer that loses its disk needs; unset: nobody does",
        examples=[{"keepers": 3}],
    )

    @model_validator(mode="after")
    def _ordered(self) -> Swarm:
        if self.deadline_floor > self.deadline_ceiling:
            raise ValueError(f"deadline_floor = {self.deadline_floor} is above deadline_ceiling; lower it")
        if self.lease > self.shrink_after:
            raise ValueError(f"lease = {self.lease} is above shrink_after = {self.shrink_after}; raise shrink_after")
        return self


class Manifest(Table):
    """Everything that the peers of a run agree on. Frozen: ``changed`` makes another one."""

    run: Run
    model: Model = Model()
    data: Data = Data()
    inner: Inner = Inner()
    outer: Outer
    compressor: Compression
    exchange: Exchange
    swarm: Swarm = Swarm()

    @model_validator(mode="after")
    def _every_fragment_in_time(self) -> Manifest:
        steps, fragments = self.inner.steps, self.outer.fragments
        if steps % fragments:
            above = steps + fragments - steps % fragments
            nearest = f"{above - fragments} or {above}" if steps > fragments else f"{above}"
            raise ValueError(
                f"inner.steps = {steps} is no multiple of outer.fragments = {fragments}, so no fragment would be "
                f"synchronised every {steps} steps; take {nearest}"
            )
        return self

    @model_validator(mode="after")
    def _overlap_ends(self) -> Manifest:
        between = self.inner.steps // self.outer.fragments
        if self.outer.overlap >= between:
            raise ValueError(
                f"outer.overlap = {self.outer.overlap} must be below inner.steps / outer.fragments = {between}, "
                "or a fragment's next round begins before its last one is applied"
            )
        return self

    @property
    def weighting(self) -> Literal["equal", "tokens"]:
        """What contributions count by. Unset, all inner steps count alike where a pace lets peers make other numbers
        of them: by tokens where contributions are as long as if of H steps, and equally where they are not.
        """
        return self.outer.weighting or ("tokens" if self.inner.pace == "speed" else "equal")

    @property
    def digest(self) -> Digest:
        """blake2b-256 of the values: the run's id."""
        return hashlib.blake2b(_DOMAIN + canonical(self), digest_size=32).digest()

    @property
    def run_id(self) -> str:
        """The digest's first 12 hexadecimal digits, for people."""
        return self.digest.hex()[:12]

    @classmethod
    def of(cls, tables: Mapping[str, Any], source: str) -> Manifest:  # Any: values of every TOML type
        """The manifest of these tables. Raises ConfigError naming ``source`` and the first thing that is wrong."""
        return checked(cls, tables, source)

    def to_toml(self) -> str:
        """The manifest as a commented file; reading it back gives the same digest."""
        return to_toml(self)

    def changed(self, **tables: Any) -> Manifest:  # Any: each a mapping of keys to values
        """A checked copy: ``manifest.changed(run={"rounds": 10})``. Raises ConfigError."""
        given = self.model_dump()
        for table, keys in tables.items():
            given[table] = given.get(table, {}) | dict(keys)
        return self.of(given, "changed manifest")
