"""Tasks, methods and compressors that a researcher brings, as objects, by ``package.module:Class``, or by entry point.

A task is a class or an object with three functions, of which none need care for seeds:

    model()                      a freshly initialised model
    loss(model, rank, step)      the mean loss of one batch of the peer of this rank
    held_out(model)              the loss on data that nobody trains on

Each is called with torch's generator seeded: by the run's seed, and a batch by the rank and the step, too, so that all
methods of a study see the same first weights and batches. A class whose ``__init__`` takes arguments gets the terms,
a Manifest, and the number of peers. ``unit`` is that of its losses, ``tokens_of_step`` what a peer sees in a step.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from importlib import import_module
from types import CellType, CodeType, FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn

from decentral import compressors, optimizers
from decentral.errors import ConfigError
from decentral.lab.work import OneByOne, Trained
from decentral.manifest import Manifest
from decentral.plugins import added, nearest

__all__ = ["TASKS", "Brought", "OwnWork", "bring_compressor", "bring_method", "bring_task", "brought", "check_task"]
__all__ += ["digest_of", "forget", "is_own", "load", "method_name", "unit_of", "version_of_method", "version_of_task"]

TASKS: Final = ("language", "language-uneven", "digits", "mixture")
_GROUP: Final = "decentral.tasks"
_PARTS: Final = ("model", "loss", "held_out")


# ---- what this process was given ----


@dataclass(frozen=True, slots=True)
class Brought:
    """Everything, to be told to other processes: classes travel by their names, so these must be of a module."""

    tasks: dict[str, Any]  # Any: a class or an object, as above
    methods: dict[str, type[optimizers.OuterMethod]]
    compressors: dict[str, type[Any]]  # Any: Method of decentral.compressors.base

    def copy(self) -> Brought:
        """Return the same, which what is brought later does not change."""
        return Brought(dict(self.tasks), dict(self.methods), dict(self.compressors))

    def use(self) -> None:
        """Know it here, and nothing that another study brought: two may have a class of one name."""
        forget()
        for name, task in self.tasks.items():
            bring_task(task, name)
        for method in self.methods.values():
            bring_method(method)
        for compressor in self.compressors.values():
            bring_compressor(compressor)

    @property
    def of_main(self) -> list[str]:
        """Return the names of what is defined in a notebook, a script or a function: no other process can import it."""
        found = {**self.tasks, **self.methods, **self.compressors}
        return [name for name, one in found.items() if not _is_importable(_class_of(one))]


def _is_importable(kind: type) -> bool:
    return kind.__module__ != "__main__" and "<locals>" not in kind.__qualname__


_here = Brought({}, {}, {})


def forget() -> None:
    """Begin a study: it knows what it brings itself."""
    for known in (_here.tasks, _here.methods, _here.compressors):
        known.clear()


def brought() -> Brought:
    """Return what was brought to this process so far."""
    return _here


def bring_method(method: type[optimizers.OuterMethod]) -> str:
    """Know an outer method by its name, which is returned; one without has its class's. ConfigError."""
    if not (isinstance(method, type) and issubclass(method, optimizers.OuterMethod)):
        raise ConfigError(f"{method!r:.60} is no outer method; derive it from decentral.optimizers.OuterMethod")
    if not hasattr(method, "name"):
        method.name = method.__name__
    optimizers.bring(method)
    if method.name not in optimizers.presets(ours=True):
        _here.methods[method.name] = method
    return method.name


def bring_compressor(compressor: type[Any]) -> None:  # Any: as in Brought
    """Know a compressor by its name. ConfigError where it cannot be."""
    compressors.bring(compressor)
    if not compressor.__module__.startswith("decentral."):
        _here.compressors[compressor.name] = compressor


def bring_task(task: Any, name: str = "") -> str:  # Any: as in Brought
    """Know a task by a name, which is returned. ConfigError where one of its functions is missing."""
    name = name or _class_of(task).__name__
    if not is_own(name):
        raise ConfigError(f"task {name} is the name of one of ours; call the class otherwise")
    _check_parts(name, task)
    _here.tasks[name] = task
    return name


def method_name(preset: str) -> str:
    """Return the name of a preset, or of the method of ``package.module:Class``, which is brought by that."""
    return bring_method(load(preset)) if ":" in preset else preset


# ---- tasks by name ----


def is_own(task: str) -> bool:
    """Tell a researcher's task from those of the laboratory."""
    return task not in TASKS


def check_task(task: str) -> str:
    """Return the name of a task that there is. ConfigError for any other."""
    if is_own(task):
        _check_parts(task, _task_of(task))
    return task


def _task_of(task: str) -> Any:  # Any: as in Brought
    if task in _here.tasks:
        return _here.tasks[task]
    if ":" in task:
        return load(task)
    point = added(_GROUP).get(task)
    if point is None:
        hint = nearest(task, [*TASKS, *_here.tasks, *added(_GROUP)])
        raise ConfigError(f"{task[:60]!r} is no task; {hint}; your own is written as package.module:Class")
    return load(point.value)


def load(spelling: str) -> Any:  # Any: whatever has that name
    """Import what ``package.module:Class`` names. ConfigError where nothing has that name."""
    module, _, name = spelling.partition(":")
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # somebody else's module runs here
        why = " ".join(str(error).split())[:120]
        raise ConfigError(f"{spelling[:80]!r} does not load ({why}); install it, or put it beside the study") from error


def _check_parts(name: str, task: object) -> None:
    if missing := [part for part in _PARTS if not callable(getattr(task, part, None))]:
        raise ConfigError(
            f"task {name} has no {missing[0]}; it needs model(), loss(model, rank, step), held_out(model)"
        )


def unit_of(task: str) -> str:
    """Return the unit of its losses."""
    if task == "digits":
        return "nats per digit"
    return str(getattr(_task_of(task), "unit", "nats")) if is_own(task) else "bits per byte"


class OwnWork:
    """A researcher's task as Work: seeded, and on a device."""

    def __init__(self, task: str, manifest: Manifest, peers: int, device: str = "cpu") -> None:
        found = _task_of(task)
        if isinstance(found, type):
            found = found(manifest, peers) if inspect.signature(found).parameters else found()
        self._task: Any = found
        self._seed, self._batch, self._device = manifest.run.seed, manifest.data.batch_size, device

    def model(self, number: int = 0) -> nn.Module:
        """Do what ``Work.model`` says."""
        with _with_seed(self._seed + number):
            made: nn.Module = self._task.model()
        return made.to(self._device)

    @property
    def tokens_of_step(self) -> int:
        """Return ``Work.tokens_of_step``: what the task says, or data.batch_size."""
        return int(getattr(self._task, "tokens_of_step", self._batch))

    def loss(self, module: nn.Module, rank: int, step: int) -> Tensor:
        """Do what ``Work.loss`` says."""
        with _with_seed(self._seed, rank, step):
            loss: Tensor = self._task.loss(module, rank, step)
        return loss

    @torch.no_grad()
    def held_out(self, module: nn.Module) -> float:
        """Do what ``Work.held_out`` says; in evaluation mode."""
        trains = module.training
        with _with_seed(0):
            found = float(self._task.held_out(module.eval()))
        module.train(trains)
        return found

    def trained(self, modules: Sequence[nn.Module]) -> Trained:
        """Do what ``Work.trained`` says."""
        return OneByOne(self, modules)


@contextmanager
def _with_seed(*words: int) -> Iterator[None]:
    """Draw as these numbers say; afterwards the caller's generator is as it was."""
    text = ",".join(map(str, words)).encode("ascii")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:7], "big"))
        yield


# ---- what a cell's id says of them ----
#
# A class of a notebook is written again and again under one name: a digest of its code, constants and plain attributes
# is behind the ids of its cells, so that an outcome is of the class that made it. Functions that it calls are not.


def version_of_task(task: str) -> str:
    """Return its name and the digest of what it does."""
    return f"{task} {digest_of(_task_of(task))}"


def version_of_method(name: str) -> str:
    """Return the same of a method that was brought; empty for any other."""
    method = _here.methods.get(name)
    return "" if method is None else f"; {name} {digest_of(method)}"


def digest_of(thing: object) -> str:
    """Return eight hexadecimal digits."""
    ours = ("decentral", "builtins")
    kinds = [kind for kind in _class_of(thing).__mro__ if kind.__module__.partition(".")[0] not in ours]
    own = {} if isinstance(thing, type | FunctionType | partial) else _values(thing)
    told = [_spell(one) for kind in kinds for one in sorted(vars(kind).items())] + [_spell(one) for one in own.items()]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:8]


def _values(thing: object) -> dict[str, object]:
    """Return an object's own values, those in slots, too."""
    slots = [name for kind in type(thing).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    known = {name: getattr(thing, name) for name in slots if hasattr(thing, name)}
    return known | getattr(thing, "__dict__", {})


def _names(slots: str | Iterable[str]) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _spell(named: tuple[str, object]) -> str:
    name, value = named
    return name if name.startswith("__") and not callable(value) else f"{name}: {_spell_value(value)}"


def _spell_value(value: object) -> str:
    """Spell what decides a number; of what is none of these the type alone."""
    function = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))  # type: ignore[arg-type]
    if isinstance(function, FunctionType):
        around = [_spell_value(cell.cell_contents) for cell in function.__closure__ or () if _is_filled(cell)]
        return f"{_code(function.__code__)} {function.__defaults__} {function.__kwdefaults__} {around}"
    if isinstance(value, Tensor):
        flat_N = value.detach().to_dense().cpu().flatten().contiguous().view(torch.uint8)
        return hashlib.sha256(flat_N.numpy().tobytes()).hexdigest()
    if isinstance(value, Mapping):
        return str([(repr(key), _spell_value(one)) for key, one in value.items()])
    if isinstance(value, list | tuple):
        return str([_spell_value(one) for one in value])
    if is_dataclass(value) and not isinstance(value, type):
        return str([(one.name, _spell_value(getattr(value, one.name))) for one in fields(value)])
    is_plain = isinstance(value, str | bytes | int | float | complex | None)
    return repr(value) if is_plain else _constant(value) if isinstance(value, frozenset | set) else type(value).__name__


def _is_filled(cell: CellType) -> bool:
    try:
        return not isinstance(cell.cell_contents, type)
    except ValueError:  # a name that was not bound yet
        return False


def _code(code: CodeType) -> str:
    constants = [_code(one) if isinstance(one, CodeType) else _constant(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _constant(value: object) -> str:
    return str(sorted(map(repr, value))) if isinstance(value, frozenset | set) else repr(value)


def _class_of(thing: Any) -> type:  # Any: as in Brought
    return thing if isinstance(thing, type) else type(thing)
