"""The tables of a study: what is trained, which methods are compared, what is searched for, and how it is judged.

Every table that is called as one of a manifest ([model], [data], [inner], a method's outer, compressor, exchange) has a
manifest's keys; they are checked when the manifests are made.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from decentral.errors import ConfigError, UsageError
from decentral.lab.cells import Flips, Kind, Line
from decentral.lab.own import check_task, is_own, method_name
from decentral.manifest import Manifest, check_methods, preset_manifest
from decentral.manifest.table import Count, NotNegative, Positive, Table, Word, check_model, one_line
from decentral.manifest.terms import INNER_OPTIMIZERS, Inner
from decentral.optimizers import make_outer, presets
from decentral.plugins import nearest, to_install

__all__ = [
    "PEERS",
    "Aims",
    "Compare",
    "Control",
    "Link",
    "Method",
    "Place",
    "Reference",
    "Settings",
    "Study",
    "Values",
    "check_device",
    "check_installed",
    "combinations",
    "grid_of",
    "is_paced",
    "kind_of",
    "load_study",
    "parse_study",
    "study_of",
]

Keys = dict[str, Any]  # Any: values of every TOML type
Lists = dict[str, Annotated[list[str | bool | int | float], Field(min_length=1, max_length=64)]]
Seed = Annotated[int, Field(ge=0, lt=2**31)]


def _in_a_line(check: Callable[[str], str]) -> Callable[[Any], Any]:  # Any: whatever the file has there
    """Turn its ConfigError into what pydantic tells with the place."""

    def check_value(value: Any) -> Any:  # Any: as above
        try:
            return check(value) if isinstance(value, str) else value
        except ConfigError as error:
            raise ValueError(str(error)) from None

    return check_value


class Aims(Table):
    """[study]: the question."""

    name: Word = Field(description="what people call the study")
    task: Annotated[str, AfterValidator(_in_a_line(check_task))] = Field(
        default="language",
        description="language, language-uneven, digits, mixture, package.module:Class, or what a package adds",
    )
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
    def _check_length(self) -> Aims:
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
    preset: Annotated[Word, BeforeValidator(_in_a_line(method_name))] = Field(
        description="decentral optimizers lists them; or package.module:Class"
    )
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
        """Return the entries that search for settings of their own."""
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


# ---- from tables to manifests ----
#
# A manifest of a cell is the preset, what all share, what the method has, and the grid's point; what comes later wins.
# Every peer of every method sees as many tokens, so a method's H must divide the inner steps.

Values = tuple[tuple[str, Any], ...]  # TABLE.KEY and what it is; Any: values of every TOML type
Tables = dict[str, dict[str, Any]]  # Any: as above

PEERS: Final = "peers"  # the one key of a grid that no manifest has
_CARRIER = "local_sgd"  # the preset whose manifest carries the terms of a reference
_OF_ALL = ("model", "data", "inner")
_OF_METHODS = (*_OF_ALL, "outer", "compressor", "exchange")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cell stands in a study: of whom it is, where on the grid, and with what settings."""

    entry: str
    point: Values
    learning_rate: float
    own: Values = ()  # the entry's constants that it tries


def grid_of(study: Study) -> list[Values]:
    """Its points; one without any key where there is no grid."""
    return list(combinations(study.grid))


def combinations(lists: Mapping[str, list[Any]]) -> Iterator[Values]:  # Any: values of every TOML type
    """Every combination of one value of each."""
    for values in itertools.product(*lists.values()):
        yield tuple(zip(lists, values, strict=True))


def kind_of(entry: Method | Reference) -> Kind:
    """How its cells are run."""
    return "swarm" if isinstance(entry, Method) else entry.kind


@dataclass(frozen=True)
class Settings:
    """Manifests of one study."""

    study: Study

    @cached_property
    def entries(self) -> dict[str, Method | Reference]:
        """By name."""
        return {entry.name: entry for entry in self.study.entries}

    def peers(self, point: Values) -> int:
        """Peers at this point of the grid."""
        given = dict(point).get(PEERS, self.study.study.peers)
        if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= 256:
            raise ConfigError(f"grid.peers: {given!r} is no number of peers; use whole numbers from 1 to 256")
        return given

    def manifest(self, place: Place, seed: int) -> Manifest:
        """Checked terms. Raises ConfigError naming the entry."""
        entry = self.entries[place.entry]
        try:
            return self._manifest(entry, place, seed)
        except ConfigError as error:
            raise ConfigError(f"{entry.name}: {error}") from error

    def steps(self, place: Place) -> int:
        """Inner steps that every peer makes."""
        return self._steps(self._tables(self.entries[place.entry], place))

    def _manifest(self, entry: Method | Reference, place: Place, seed: int) -> Manifest:
        tables = self._tables(entry, place)
        steps = self._steps(tables)
        tables["run"] = {"name": "lab", "salt": "lab", "seed": seed}
        if isinstance(entry, Reference):
            tables["inner"]["steps"] = 1
        made = preset_manifest(entry.preset if isinstance(entry, Method) else _CARRIER, **tables)
        each = made.inner.steps
        if steps % each:
            raise ConfigError(
                f"inner.steps = {each} does not divide the {steps} inner steps that every peer makes; choose study."
                "rounds or study.tokens, or its own inner.steps, so that all end together"
            )
        rounds = steps if is_paced(made) else steps // each
        made = made.changed(run={"rounds": rounds * made.outer.fragments})
        check_methods(made)
        if made.data.corpus != "stdlib" or made.data.digest is not None:
            raise ConfigError(
                f"data.corpus = \"{made.data.corpus}\": a study trains on its task's own data, the standard library's "
                "source or scikit-learn's digits; leave out corpus and digest, and choose with study.task"
            )
        if isinstance(entry, Reference) and INNER_OPTIMIZERS[made.inner.optimizer_name].forward_only:
            raise ConfigError(
                f'inner.optimizer = "{made.inner.optimizer_name}" makes no gradients; a reference averages them'
            )
        return made

    def _tables(self, entry: Method | Reference, place: Place) -> Tables:
        """Return the tables that change in the preset."""
        study, own = self.study, entry.model_dump()
        tables: Tables = {name: dict(getattr(study, name)) for name in _OF_ALL}
        if study.study.task == "digits" or is_own(study.study.task):
            tables["model"] = {"task": "custom", "layers": 1, "context": 1} | tables["model"]
            preset = presets().get(entry.preset) if isinstance(entry, Method) else None
            tables["inner"] = {"clip": 1.0, **({} if preset is None else preset.inner)} | tables["inner"]
        if study.study.task == "mixture":
            tables["model"] = {"experts": 4} | tables["model"]
        allowed = _OF_METHODS if isinstance(entry, Method) else _OF_ALL
        for name in allowed:
            tables[name] = tables.get(name, {}) | own.get(name, {})
        tables["inner"]["learning_rate"] = place.learning_rate
        of_methods = [table for table in _OF_METHODS if table not in allowed]
        shared = [(key, value) for key, value in place.point if key != PEERS and key.split(".")[0] not in of_methods]
        for key, value in (*place.own, *shared):
            _set(tables, key, value, allowed)
        return tables

    def _steps(self, tables: Tables) -> int:
        """Inner steps of a peer: the same for all that see as much in a step."""
        aims = self.study.study
        if aims.rounds is not None:
            return aims.rounds * int(self.study.inner.get("steps", Inner().steps))
        assert aims.tokens is not None, "one of the two is set"
        sizes = preset_manifest(_CARRIER, model=tables["model"], data=tables["data"])
        context = 1 if sizes.model.task == "custom" else sizes.model.context
        steps = aims.tokens // (sizes.data.batch_size * context)
        if not steps:
            raise ConfigError(f"study.tokens = {aims.tokens} is less than one inner step sees; raise it")
        return steps


def is_paced(manifest: Manifest) -> bool:
    """Return whether rounds may be of other than H inner steps of every peer, so that it takes more of them."""
    method = make_outer(manifest.outer.method, manifest.outer.hyper)
    paced = method.timing.is_by_time or manifest.inner.pace not in (None, "equal")
    return paced or method.timing.quorum > 0


def _set(tables: Tables, key: str, value: Any, allowed: tuple[str, ...]) -> None:  # Any: of every TOML type
    table, dot, name = key.partition(".")
    if not dot or table not in allowed:
        raise ConfigError(f"{key[:60]!r} is no TABLE.KEY that this has; {nearest(table, [*allowed, PEERS])}")
    tables[table][name] = value


# ---- from a file to a checked study ----
#
# Every manifest that it may need is made once, before anything is run.


def load_study(path: Path) -> Study:
    """The study in a file. Raises ConfigError with one line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror or error}); docs/lab.md says how to write one"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); a study is a TOML file") from error
    sys.path.append(str(path.resolve().parent))  # last: classes that it names may be in its neighbours
    return parse_study(text, str(path))


def parse_study(text: str, source: str = "study") -> Study:
    """The study of a text, with all its methods and settings checked. Raises ConfigError."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not TOML: {one_line(error)}; correct that place") from None
    return study_of(tables, source)


def study_of(tables: Mapping[str, object], source: str = "study") -> Study:
    """The study of these tables, as ``parse_study``."""
    study = check_model(Study, tables, source)
    try:
        _check_settings(study)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return study


def _check_settings(study: Study) -> None:
    settings = Settings(study)
    for point in grid_of(study):
        settings.peers(point)
        for entry in study.entries:
            for own in [(), *combinations(entry.search)]:
                settings.manifest(Place(entry.name, point, study.study.learning_rates[0], own), 0)
        for control in study.control:
            if control.flips == "momentum":
                _check_has_a_state(control, settings.manifest(Place(control.of, point, 1.0), 0))


def _check_has_a_state(control: Control, terms: Manifest) -> None:
    """ConfigError where what the state adds to a step is nothing, with either sign."""
    if not make_outer(terms.outer.method, terms.outer.hyper).init(torch.zeros(1)):
        raise ConfigError(
            f'{control.name}: flips = "momentum" does not fit {terms.outer.method}, which has no state; use "update"'
        )


def check_installed(study: Study) -> None:
    """ConfigError unless what a study needs beside the package is there: before the first run, not after the last."""
    wanted = {"scipy": "scipy", "matplotlib": "matplotlib"}
    wanted |= {"sklearn": "scikit-learn"} if study.study.task == "digits" else {}
    for module, name in wanted.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"a study needs {name}; {to_install('lab')}, which has it")


def check_device(study: Study, device: str) -> None:
    """UsageError unless models of this study can train on ``device``, as torch spells it."""
    if study.study.task == "digits" and device != "cpu":
        raise UsageError(f"--device {device}: digits are so small that they train on the processor; leave it out")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # the last two: torch was built without that kind
        why = one_line(error)
        raise UsageError(f"--device {device}: this machine has none that torch can use ({why}); leave it out") from None
