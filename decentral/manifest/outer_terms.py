"""What all peers do together: the outer method, how contributions become one vector, how they are packed and sent."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from decentral.manifest.table import Table
from decentral.manifest.values import Positive, Spelling, Steps, Word

MOST = 2**53  # whole numbers of a method: they are hashed as floats, and beyond it two would have one digest


def _check_own(keys: Mapping[str, Any]) -> None:  # Any: values of every TOML type
    """ValueError for keys beside the declared ones that no method may have."""
    for key, value in keys.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", key):
            raise ValueError("a key of a method is written in small letters, digits and _, 32 at most")
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"{key} of a method must be a number or a word")
        if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9_(),.=>+ -]{1,256}", value):
            raise ValueError(f"{key} has characters that do not belong, or too many")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} must be finite")
        if isinstance(value, int) and abs(value) > MOST:
            raise ValueError(f"{key} must be between -2**53 and 2**53")


class Combining(Table):
    """How contributions become one vector. Keys beside these are the rule's own: decentral aggregation lists them."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    rule: Word = Field(description="decentral aggregation lists them; mean is what happens without this table")

    @model_validator(mode="after")
    def _plain_keys(self) -> Combining:
        _check_own(self.own)
        return self

    def own_keys(self) -> list[tuple[str, Any, str]]:  # Any: a rule's defaults
        """Those of the rule that it names."""
        from decentral.optimizers import describe_aggregation_keys  # torch

        return describe_aggregation_keys(self.rule)

    @property
    def own(self) -> dict[str, Any]:  # Any: numbers and words
        """The rule's keys that are set."""
        return dict(self.model_extra or {})


class Outer(Table):
    """What all peers do together. Keys beside these are the method's own: decentral optimizers lists them."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    method: Word = Field(description="outer optimizer: decentral optimizers lists them")
    learning_rate: Positive | None = Field(
        default=None,
        description="unset: the method's own; diloco's then follows the number of contributors",
        examples=[0.7],
    )
    fragments: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="slices of the model that take turns"
    )
    overlap: Steps = Field(
        default=0, description="tau: inner steps that go on while a round is in flight; 0 waits for it"
    )

    weighting: Literal["equal", "tokens"] | None = Field(
        default=None,
        description="equal, or by tokens (1/16 to 16 times the typical); unset: equal, or tokens with a pace of speed",
        examples=["tokens"],
    )
    norm_clip: Literal["none", "median"] | None = Field(
        default=None,
        description="median: contributions longer than the typical one are shortened to it; unset: none",
        examples=["median"],
    )

    aggregation: Combining | None = Field(
        default=None,
        description="how contributions become one vector: decentral aggregation lists the rules; unset: mean",
        examples=[{"rule": "rfa"}],
    )

    @model_validator(mode="before")
    @classmethod
    def _without_unset(cls, given: Any) -> Any:  # Any: what a file or a caller has, checked after this
        """A key of a method that is None is one that is left out."""
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if value is not None or key in cls.model_fields}

    @model_validator(mode="after")
    def _plain_keys(self) -> Outer:
        _check_own(self.model_extra or {})
        return self

    def own_keys(self) -> list[tuple[str, Any, str]]:  # Any: a method's defaults
        """Those of the method that it names."""
        from decentral.optimizers import describe_keys  # torch

        return describe_keys(self.method)

    @property
    def hyper(self) -> dict[str, float | str]:
        """The hyper-parameters that are set, by the names that ``make_outer`` knows."""
        rate = {} if self.learning_rate is None else {"lr": self.learning_rate}
        return rate | dict(self.model_extra or {})


class Compression(Table):
    """How a contribution is packed."""

    chain: Spelling = Field(description="decentral compressors lists them; sparsifier >> quantiser")
    feedback: Spelling = Field(
        default="none",
        description='what becomes of what compression left unsent: "ef(beta=0.95)", "dgc", "none"; in a gather "ef21"',
    )


class Exchange(Table):
    """Who sends what to whom."""

    kind: Literal["gather", "reduce", "pair"] = Field(
        description="gather: all to all, sparse methods; reduce: by parts, dense ones; pair: gossip"
    )
