"""What a study holds: what is trained, which methods are compared, what is searched for, and how it is judged.

Every table that is called as one of a manifest ([model], [data], [inner], a method's outer, compressor, exchange) has
a manifest's keys; they are checked when the manifests are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from decentral.lab.runs.cell import Flips, Task
from decentral.lab.runs.line import Line
from decentral.manifest.table import Count, NotNegative, Positive, Table, Word

__all__ = ["Aims", "Compare", "Control", "Link", "Method", "Reference", "Study"]

Keys = dict[str, Any]  # Any: values of every TOML type
Lists = dict[str, Annotated[list[str | bool | int | float], Field(min_length=1, max_length=64)]]
Seed = Annotated[int, Field(ge=0, lt=2**31)]


class Aims(Table):
    """[study]: the question."""

    name: Word = Field(description="what people call the study")
    task: Task = Field(default="language", description="language, language-uneven, digits or mixture")
    peers: Annotated[int, Field(ge=1, le=256)] = Field(default=4, description="replicas that train")
    rounds: Count | None = Field(
        default=None, description="rounds of inner.steps of [inner] each, by which all train: set this or tokens"
    )
    tokens: Count | None = Field(default=None, description="that a peer sees, of every method: set this or rounds")
    learning_rates: list[Positive] = Field(
        min_length=1, max_length=64, description="inner ones that every method tries"
    )
    search_seeds: list[Seed] = Field(default=[101], min_length=1, description="of the search; none that is reported")
    seeds: list[Seed] = Field(default=[1, 2, 3, 4, 5], min_length=1, description="that are reported, paired")
    base: Word | None = Field(
        default=None, description="the method that the others are compared with; unset: the first"
    )
    margin: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.005, description="of the base's loss: smaller differences are none"
    )
    points: Annotated[int, Field(ge=1, le=1000)] = Field(default=10, description="of each curve")
    windows: Annotated[int, Field(ge=1, le=65536)] = Field(default=128, description="of held-out text")
    alpha: Positive | None = Field(default=None, description="of digits: small where peers have other ones; unset: 1")

    @model_validator(mode="after")
    def _one_length(self) -> Aims:
        if (self.rounds is None) == (self.tokens is None):
            raise ValueError("rounds and tokens both say how long all train; set one of them")
        if self.alpha is not None and self.task != "digits":
            raise ValueError(f"alpha is of digits, and the task is {self.task}; leave it out")
        return self

    @model_validator(mode="after")
    def _apart(self) -> Aims:
        for name, given in (("seeds", self.seeds), ("search_seeds", self.search_seeds)):
            if len(set(given)) < len(given):
                raise ValueError(f"{name} has one twice; each seed is one run")
        if both := sorted(set(self.seeds) & set(self.search_seeds)):
            raise ValueError(f"seed {both[0]} is searched and reported; what is chosen by a seed looks good on it")
        return self


class Reference(Table):
    """[[reference]]: what methods are measured against, without an outer one."""

    name: Word = Field(description="in tables and figures")
    kind: Literal["data-parallel", "alone"] = Field(
        description="data-parallel: every gradient averaged in each step; alone: one peer"
    )
    inner: Keys = Field(default={}, description="its own keys of [inner]")
    search: Lists = Field(default={}, description="its own constants that it tries")


class Method(Table):
    """[[method]]: a preset of ours, and what is changed in it."""

    name: Word = Field(description="in tables and figures")
    preset: Word = Field(description="decentral optimizers lists them")
    model: Keys = Field(default={}, description="its own keys of [model]")
    inner: Keys = Field(default={}, description="its own keys of [inner]")
    outer: Keys = Field(default={}, description="its own keys of [outer]")
    compressor: Keys = Field(default={}, description="its own keys of [compressor]")
    exchange: Keys = Field(default={}, description="its own keys of [exchange]")
    search: Lists = Field(default={}, description="its own constants that it tries, by TABLE.KEY")


class Control(Table):
    """[[control]]: a method with one sign wrong, which must come out worse."""

    name: Word = Field(description="in tables and figures")
    of: Word = Field(description="the method; its chosen settings are the control's")
    flips: Flips = Field(default="update", description="update: the outer step; momentum: what its state adds")


class Link(Table):
    """[[link]]: machines and lines on which hours are told."""

    name: Word = Field(description="in tables and figures")
    rate_mbit: Positive = Field(description="Mbit/s of every peer's line, up and down each")
    latency_ms: NotNegative = Field(default=0.0, description="one way")
    step_seconds: Positive = Field(default=1.0, description="of one inner step")
    parameters: Positive | None = Field(
        default=None, description="of the model that the small one stands for; unset: its own"
    )
    slow: Annotated[float, Field(ge=1)] = Field(default=1.0, description="times as long that one peer's steps take")
    thin: Annotated[float, Field(ge=1)] = Field(default=1.0, description="times as long that one peer's bytes take")

    @property
    def line(self) -> Line:
        """Without its name."""
        return Line(self.rate_mbit, self.latency_ms, self.step_seconds, self.parameters, self.slow, self.thin)


class Compare(Table):
    """[[compare]]: two that are set against each other, beside the base."""

    a: Word = Field(description="a method, reference or control")
    b: Word = Field(description="what it is measured against")


class Study(Table):
    """Everything that a study declares before its first run."""

    study: Aims
    model: Keys = Field(default={}, description="keys of a manifest's [model], for all")
    data: Keys = Field(default={}, description="keys of a manifest's [data], for all")
    inner: Keys = Field(default={}, description="keys of a manifest's [inner], for all")
    grid: Lists = Field(default={}, description="peers, or TABLE.KEY of a manifest: every combination is a study")
    method: list[Method] = Field(min_length=1, description="what is compared")
    reference: list[Reference] = Field(default=[], description="what methods are measured against")
    control: list[Control] = Field(default=[], description="what must come out worse")
    link: list[Link] = Field(default=[], description="where hours are told")
    compare: list[Compare] = Field(default=[], description="pairs that are compared beside the base")

    @property
    def entries(self) -> list[Method | Reference]:
        """Who searches for settings of its own."""
        return [*self.method, *self.reference]

    @property
    def base(self) -> str:
        """The name of what the others are compared with."""
        return self.study.base or self.method[0].name

    @model_validator(mode="after")
    def _names(self) -> Study:
        for kind, names in (("method, reference and control", list(self._names_compared())), ("link", self._links())):
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"{kind} {twice[0]} is there twice; each needs a name of its own")
        if self.base not in [entry.name for entry in self.entries]:
            raise ValueError(f"study.base = {self.base}: no method or reference has that name")
        for control in self.control:
            if control.of not in [method.name for method in self.method]:
                raise ValueError(f"control {control.name} is of {control.of}: no method has that name")
        for compare in self.compare:
            for name in (compare.a, compare.b):
                if name not in self._names_compared():
                    raise ValueError(f"compare {name}: no method, reference or control has that name")
            if compare.a == compare.b:
                raise ValueError(f"compare {compare.a}: with itself; name another")
        return self

    @model_validator(mode="after")
    def _same_budget(self) -> Study:
        most = len(self.study.learning_rates)
        for entry in self.entries:
            tried = 1
            for values in entry.search.values():
                tried *= len(values)
            if entry.search and tried > most:
                raise ValueError(
                    f"{entry.name}: search tries {tried} settings of its own, and every method may try {most}, as many "
                    "as study.learning_rates has; shorten the lists"
                )
        return self

    def _names_compared(self) -> Iterator[str]:
        yield from (entry.name for entry in self.entries)
        yield from (control.name for control in self.control)

    def _links(self) -> list[str]:
        return [link.name for link in self.link]
