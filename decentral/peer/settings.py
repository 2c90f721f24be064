"""A peer as it was asked to be: how ``join`` was called, and what follows from that."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeGuard, TypeVar

from torch import Tensor

from decentral.errors import ConfigError
from decentral.manifest import Manifest
from decentral.plugins import nearest
from decentral.swarm.invite import Invite
from decentral.training.clocks import Scheduler
from decentral.training.inner_states import InnerStates, Together
from decentral.training.live_model import LiveModel
from decentral.training.processes import Accelerator
from decentral.transport import Transport
from decentral.transport.throttle import Caps

Observer = Callable[[dict[str, object]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """The keyword arguments of ``join``, which says what they mean and has their defaults."""

    accelerator: Accelerator | None
    out: str | Path | None
    listen: Sequence[str] | None
    scheduler: Scheduler | Sequence[Scheduler] | None
    alone: bool
    require_peers: int
    join_timeout: float | None
    observer: Observer | None
    identity_path: str | Path | None
    checkpoint_every: int
    tokens_per_step: int
    max_upload: float | str | None
    max_download: float | str | None
    daily_upload: int | str | None
    transport: Transport | str | None
    relays: Sequence[str]
    lan: bool
    commands: bool
    admit: str | None = field(repr=False)
    on_nan: Literal["stop", "restart"]
    quiet: bool
    keep_serving: bool
    offload: str | Path | None
    evaluate: Callable[[], float | Tensor] | None
    moved: Sequence[str] | None

    def __post_init__(self) -> None:
        for name, (fits, rule) in _KINDS.items():
            if not fits(value := getattr(self, name)):
                shown = "..." if name == "admit" else " ".join(repr(value).split())[:60]
                raise ConfigError(f"join({name}={shown}): {rule}")
        check_seconds("join", self.join_timeout)
        if self.on_nan not in ("stop", "restart"):
            raise ConfigError(f'join(on_nan={self.on_nan!r}): "stop" and "restart" are known')
        if self.evaluate is not None and not callable(self.evaluate):
            raise ConfigError(
                f"join(evaluate=...): a {type(self.evaluate).__name__} cannot be called; pass a function without "
                "arguments that returns the held-out loss of the model that it is joined with"
            )


def check_seconds(caller: str, join_timeout: object) -> None:
    """ConfigError for a time that is none."""
    if join_timeout is not None and (not _is_number(join_timeout) or float(join_timeout) < 0):
        raise ConfigError(f"{caller}(join_timeout={join_timeout!r}): give seconds as a number; None waits for ever")


def check_run(run: object) -> None:
    """ConfigError for what names no run."""
    if run is not None and not isinstance(run, str | PathLike | Manifest):
        raise ConfigError(
            f"join: the run is a {type(run).__name__}; pass the path of a run.toml, a Manifest or an invite line "
            "first: join(run, model, optimizer)"
        )


def _is_number(given: object) -> TypeGuard[float]:
    return isinstance(given, Real) and not isinstance(given, bool)


def _is_count(given: object) -> TypeGuard[int]:
    return isinstance(given, Integral) and not isinstance(given, bool)  # numpy's, too


def _is_path(given: object) -> bool:
    return given is None or isinstance(given, str | PathLike)


def _are_lines(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(one, str) for one in given)


def _is_accelerator(given: object) -> bool:
    asked = ("unwrap_model", "is_main_process", "num_processes")
    return given is None or all(hasattr(given, name) for name in asked)


_A_PATH = "give a path, or leave it out"
_ADDRESSES = 'give a list of multiaddrs: ["/ip4/0.0.0.0/tcp/4001"]'
_KINDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "accelerator": (_is_accelerator, "give the Accelerator that prepared the model, or leave it out"),
    "out": (_is_path, _A_PATH),
    "identity_path": (_is_path, _A_PATH),
    "offload": (_is_path, _A_PATH),
    "listen": (lambda given: given is None or _are_lines(given), _ADDRESSES),
    "relays": (_are_lines, _ADDRESSES),
    "require_peers": (_is_count, "it is a number of peers; 0 waits for none"),
    "checkpoint_every": (lambda given: _is_count(given) and given > 0, "it is a number of commits, 1 at least"),
    "tokens_per_step": (lambda given: _is_count(given) and given >= 0, "it is a number of tokens; 0 tells none"),
    "admit": (lambda given: given is None or isinstance(given, str), "a token is a word; leave it out for an open run"),
    "observer": (lambda given: given is None or callable(given), "pass a function of one event, a dict"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One peer's: its options, and what follows from them. Rates in bytes per second."""

    options: JoinOptions
    manifest: Manifest
    invite: Invite | None  # None: it founds the run, or resumes what is in ``out``
    model: LiveModel
    optimizers: Together  # whose ``step`` is hooked
    states: InnerStates  # of them, of the schedulers and of random generators
    out: Path  # absolute
    called: Path  # the same as it was written
    identity_path: Path
    give_up_at: float | None  # monotonic s, when it stops looking for others
    caps: Caps
    daily_upload: int | None  # bytes
    admit: str | None = field(repr=False)  # the admission token, as given; what the folder keeps is not in it


# ---- arguments handed over to a script ----
#
# They are what ``decentral join INVITE --script train.py`` hands to the script's own ``decentral.join``.
#
# A script founds a run, or is told which one to join. The command line knows the invite, the folder and the limits of
# this peer: it hands them over inside the process before it runs the script, and they stand above what the script
# says:
#
#     decentral.join(None, model, optimizer)           # only ever joins what is handed over
# decentral.join("run.toml", model, optimizer)     # founds the run when nothing is
#
# Set by the command line and nobody else; a library that is told by a hidden variable would be hard to reason about.

P = ParamSpec("P")
T = TypeVar("T")

_handed_over: dict[str, Any] = {}  # arguments of join by their names; Any: as various as those are


@contextmanager
def handed_over(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Within the block every ``decentral.join`` of this process takes these ``arguments`` instead of its own."""
    _handed_over.update(arguments)
    try:
        yield
    finally:
        _handed_over.clear()


def takes_what_is_handed_over(join: Callable[P, T]) -> Callable[P, T]:
    """Have a function's arguments replaced by those that are handed over under their names."""
    signature = inspect.signature(join)

    @wraps(join)
    def with_those(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in signature.parameters:
                near = nearest(name, [known for known in signature.parameters if known[0] == name[0]])
                raise TypeError(f"{join.__name__}() has no argument {name}; {near}")
        bound = signature.bind(*args, **kwargs)
        bound.arguments.update(_handed_over)
        return join(*bound.args, **bound.kwargs)

    return with_those
