"""From a study's tables to the manifests of its cells: preset, what all share, what the method has, the grid's point.

What comes later wins. Every peer of every method sees as many tokens, so a method's H must divide the inner steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from decentral.errors import ConfigError
from decentral.lab.runs.cell import Kind
from decentral.lab.study.terms import Method, Reference, Study
from decentral.manifest import Manifest, check_methods, preset_manifest
from decentral.manifest.terms import INNER_OPTIMIZERS, Inner
from decentral.optimizers import make_outer
from decentral.plugins import nearest

__all__ = ["PEERS", "Place", "Settings", "grid_of", "is_paced", "kind_of"]

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
        if isinstance(entry, Reference) and INNER_OPTIMIZERS[made.inner.named].forward_only:
            raise ConfigError(f'inner.optimizer = "{made.inner.named}" makes no gradients; a reference averages them')
        return made

    def _tables(self, entry: Method | Reference, place: Place) -> Tables:
        """What changes in the preset."""
        study, own = self.study, entry.model_dump()
        tables: Tables = {name: dict(getattr(study, name)) for name in _OF_ALL}
        if study.study.task == "digits":
            tables["model"] = {"task": "custom", "layers": 1, "context": 1} | tables["model"]
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
        context = 1 if aims.task == "digits" else sizes.model.context
        steps = aims.tokens // (sizes.data.batch_size * context)
        if not steps:
            raise ConfigError(f"study.tokens = {aims.tokens} is less than one inner step sees; raise it")
        return steps


def is_paced(manifest: Manifest) -> bool:
    """Whether rounds may be of other than H inner steps of every peer, so that more of them are as many steps."""
    method = make_outer(manifest.outer.method, manifest.outer.hyper)
    paced = method.overrides("is_due") or manifest.inner.pace not in (None, "equal")
    return paced or method.quorum.peers > 0


def _set(tables: Tables, key: str, value: Any, allowed: tuple[str, ...]) -> None:  # Any: of every TOML type
    table, dot, name = key.partition(".")
    if not dot or table not in allowed:
        raise ConfigError(f"{key[:60]!r} is no TABLE.KEY that this has; {nearest(table, [*allowed, PEERS])}")
    tables[table][name] = value
