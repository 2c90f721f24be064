"""The options of ``join``, each declared once, and what one call of it comes to. Imports no torch.

`JoinOptions` is the one place: ``join``'s signature and docstring, the callbacks, the options of the commands and the
reference page are read from it. A new option is one entry here and the line that acts on it.
"""

# Annotations are evaluated, so that Option is there to be read; types that would import torch stand in quotes.

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, TypeVar, cast

from decentral.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from decentral.manifest import Manifest
    from decentral.swarm.invite import Invite
    from decentral.training.clocks import Scheduler
    from decentral.training.inner_states import InnerStates, Together
    from decentral.training.live_model import LiveModel
    from decentral.training.processes import Accelerator
    from decentral.transport import Transport
    from decentral.transport.throttle import Caps

Observer = Callable[[dict[str, object]], None]

# ---- which values fit ----


def is_seconds(given: object) -> bool:
    """Tell whether it is a time to wait for; None waits for ever."""
    return given is None or (isinstance(given, Real) and not isinstance(given, bool) and float(given) >= 0)


def _is_count(given: object) -> bool:
    return isinstance(given, Integral) and not isinstance(given, bool) and int(given) >= 0  # numpy's, too


def _is_path(given: object) -> bool:
    return given is None or isinstance(given, str | PathLike)


def _are_lines(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(one, str) for one in given)


def _is_name(given: object) -> bool:
    if given is None or not isinstance(given, str):
        return given is None
    from decentral.swarm.leases import is_name  # help texts need none of the wire

    return is_name(given)


def _is_accelerator(given: object) -> bool:
    asked = ("unwrap_model", "is_main_process", "num_processes")
    return given is None or all(hasattr(given, name) for name in asked)


_A_PATH = "give a path, or leave it out"
_ADDRESSES = 'give a list of multiaddrs: ["/ip4/0.0.0.0/tcp/4001"]'
SECONDS_RULE = "give seconds as a number; None waits for ever"

# ---- the options ----


@dataclass(frozen=True, slots=True)
class Option:
    """An option of ``join``: the value it has when not given, its meaning, and which values fit."""

    default: object
    meaning: str  # also the help of the command's option of this name, where there is one
    in_python: str = ""  # the rest, of which a command line knows nothing
    unit: str = ""
    fits: Callable[[object], bool] = lambda given: True
    rule: str = ""  # the way out, where a value does not fit
    is_secret: bool = False  # shown in no message, and written into nothing that others may read

    @property
    def text(self) -> str:
        """The meaning with unit and default, as the docstring of ``join`` has it."""
        unit = f"Unit: {self.unit}." if self.unit else ""
        default = f"Default: ``{self.default!r}``." if self.default not in (None, ()) else ""
        return " ".join(filter(None, (self.meaning, self.in_python, unit, default)))


class LoopOptions(TypedDict, total=False):
    """The options that only a training loop of one's own gives; a framework's callback knows them by itself."""

    accelerator: Annotated[
        "Accelerator | None",
        Option(
            None,
            "The ``Accelerator`` that prepared the model, where a peer has several processes: all of them train as "
            "one. None: this process is the peer.",
            fits=_is_accelerator,
            rule="give the Accelerator that prepared the model, or leave it out",
        ),
    ]
    scheduler: Annotated[
        "Scheduler | Sequence[Scheduler] | None",
        Option(
            None,
            "A schedule, or a list of those that the loop steps once after every inner step; saved and resumed with "
            "the checkpoint. In a newcomer to a run that is some rounds on, and in a peer that missed rounds, it is "
            "stepped to where the run is (rounds by inner steps of a round), and a warning says so. A schedule that is "
            "stepped once an epoch does not belong here; `Peer.schedule` makes one that goes by the run's rounds.",
        ),
    ]


class PeerOptions(TypedDict, total=False):
    """The options of a peer, whoever begins it: a script, a framework's callback, or the command line."""

    preset: Annotated[
        str | None,
        Option(
            None,
            "Found a run by this method, without a file: ``rounds`` of ``steps`` inner steps, with the outer rate and "
            "the exchange that suit so many and this model, and the rate and decay of this optimizer.",
        ),
    ]
    rounds: Annotated[
        int,
        Option(
            100,
            "The length of the run that ``preset`` founds; without a preset neither ``rounds`` nor ``steps`` does "
            "anything.",
            unit="rounds",
        ),
    ]
    steps: Annotated[int, Option(30, "The length of one round of that run.", unit="inner steps")]
    out: Annotated[
        str | Path | None,
        Option(
            None,
            "Run directory; ``decentral-NAME`` when not given, for an invite ``decentral-`` and eight digits of the "
            "run. A checkpoint of this run found there is resumed.",
            fits=_is_path,
            rule=_A_PATH,
        ),
    ]
    name: Annotated[
        str | None,
        Option(
            None,
            "What others see this peer called, beside its key's letters: up to 16 letters, digits, dots, underscores "
            "and hyphens. Anybody may take any name.",
            fits=_is_name,
            rule="a name is 1 to 16 letters, digits, dots, underscores and hyphens",
        ),
    ]
    listen: Annotated[
        Sequence[str] | None,
        Option(
            None,
            "Multiaddrs to listen on, such as /ip4/0.0.0.0/tcp/4001; all interfaces, any port, when not given.",
            fits=lambda given: given is None or _are_lines(given),
            rule=_ADDRESSES,
        ),
    ]
    alone: Annotated[
        bool,
        Option(
            False,
            "Train at once. Else the first ``optimizer.step``, where the run has no round yet, waits until it has, or "
            "had, a second member, and says so every half minute; ``leave()`` or the run's end ends the wait.",
        ),
    ]
    require_peers: Annotated[
        int,
        Option(
            0,
            "Wait with training until the run has so many members, this one included.",
            "The wait is in the beginning of the ``with`` block.",
            unit="members",
            fits=_is_count,
            rule="it is a number of peers; 0 waits for none",
        ),
    ]
    join_timeout: Annotated[
        float | None,
        Option(
            None,
            "Give up when nobody answered, or fewer members came than are required, in so long a time.",
            "Counted from this call; raises NoPeersError.",
            unit="seconds",
            fits=is_seconds,
            rule=SECONDS_RULE,
        ),
    ]
    observer: Annotated[
        Observer | None,
        Option(
            None,
            "A function that is called with every event, on whatever thread it happens.",
            fits=lambda given: given is None or callable(given),
            rule="pass a function of one event, a dict",
        ),
    ]
    identity_path: Annotated[
        str | Path | None,
        Option(
            None, "File of this peer's key; ``identity.key`` in ``out`` when not given.", fits=_is_path, rule=_A_PATH
        ),
    ]
    checkpoint_every: Annotated[
        int,
        Option(
            10,
            "The distance between two checkpoints.",
            unit="commits, or steps of pairs",
            fits=lambda given: _is_count(given) and bool(given),
            rule="it is a number of commits, 1 at least",
        ),
    ]
    max_writes: Annotated[
        int | str | None,
        Option(
            "2GB",
            "Write no more than this a day to the disk, as far as checkpoints can wait for that, an hour at most; "
            "votes, commits and their frames are always written.",
            unit="bytes, or a string as this",
        ),
    ]
    tokens_per_step: Annotated[
        int,
        Option(
            0,
            "Training tokens behind one inner step, told to the swarm.",
            unit="tokens",
            fits=_is_count,
            rule="it is a number of tokens; 0 tells none",
        ),
    ]
    max_upload: Annotated[
        float | str | None,
        Option(
            None,
            "Send no faster than this, over everything, such as 5mbit or 600kB/s. Votes go first.",
            unit="bytes per second, or a string as these",
        ),
    ]
    max_download: Annotated[
        float | str | None,
        Option(
            None,
            "Receive no faster than this, such as 20mbit or 2.5MB/s.",
            unit="bytes per second, or a string as these",
        ),
    ]
    daily_upload: Annotated[
        int | str | None,
        Option(
            None,
            "Send no more than this a day (UTC), such as 20GB; then train on, and contribute again the next day.",
            unit="bytes, or a string as this",
        ),
    ]
    transport: Annotated[
        "Transport | str | None",
        Option(
            None,
            "How peers are reached: go-libp2p's daemon, libp2p over TCP in this process, or py-libp2p, which is an "
            "extra. The daemon where this system has one when not given; they speak to each other.",
            "``daemon``, ``native``, ``py-libp2p``, or a transport of your own.",
        ),
    ]
    relays: Annotated[
        Sequence[str],
        Option(
            (),
            "Multiaddrs of relays, as decentral relay prints them: peers behind routers meet through them.",
            fits=_are_lines,
            rule=_ADDRESSES,
        ),
    ]
    lan: Annotated[
        bool,
        Option(
            True,
            "Announce this peer on its local networks (mDNS), and meet others of the run there: also when the invite "
            "is old or there is no internet.",
        ),
    ]
    commands: Annotated[
        bool,
        Option(
            True, "Let ``decentral status``, ``peers``, ``pause`` and ``leave`` with ``--out`` see and steer this peer."
        ),
    ]
    admit: Annotated[
        str | None,
        Option(
            None,
            "A token that others need, too: it is in this peer's invites, and a peer without it is refused. For the "
            "first peer of a run; others have it from their invite, unless that was written without it, and a restart "
            "has it from its folder.",
            fits=lambda given: given is None or isinstance(given, str),
            rule="a token is a word; leave it out for an open run",
            is_secret=True,
        ),
    ]
    on_nan: Annotated[
        Literal["stop", "restart"],
        Option(
            "stop",
            "What NaN or Inf in this peer's progress does: end with one line, or go back to the anchor.",
            "``stop`` raises NonFiniteError, which names the parameter; ``restart`` puts the live model back to the "
            "anchor, drops inner moments that are not finite, and goes on.",
            fits=lambda given: given in ("stop", "restart"),
            rule='"stop" and "restart" are known',
        ),
    ]
    quiet: Annotated[
        bool,
        Option(
            False,
            "Print nothing. Else the main process says a change of state and a round on stderr, at most one line a "
            "second, each beginning with ``decentral:``; printed and not logged, so that no configuration of logging "
            'doubles or hides them. What goes wrong is logged besides, by ``logging.getLogger("decentral")``.',
        ),
    ]
    keep_serving: Annotated[
        bool,
        Option(
            False,
            "After the run's end stay, also when started again, and give its last state to those who come late.",
            "It stays at the end of the ``with`` block until ``leave`` or Ctrl-C. Without it a folder that holds the "
            "run's last commit is ``done`` at once, and asks nobody.",
        ),
    ]
    offload: Annotated[
        str | Path | None,
        Option(
            None,
            "Folder on a disk for what rounds need beside the model, where memory is short.",
            "docs/cost.md says how much that is.",
            fits=_is_path,
            rule=_A_PATH,
        ),
    ]
    memory: Annotated[
        int | str | None,
        Option(
            None,
            "Train as many of the run's fragments as so much memory holds, beside the activations of a batch, where "
            "fewest others train; all of them when it is enough for that, or not given.",
            "docs/weak-machines.md says what it means.",
            unit="bytes, or a string as 6GB",
        ),
    ]
    share: Annotated[
        bool,
        Option(
            False,
            "Be one replica together with one to three other machines that share, none of which needs memory for the "
            "whole model: each trains a stage, by ``peer.gradients``. It waits for others as long as it takes.",
            "For a run whose terms have layout = stages; docs/weak-machines.md says more.",
        ),
    ]
    evaluate: Annotated[
        "Callable[[], float | Tensor] | None",
        Option(
            None,
            "A function without arguments that returns the held-out loss of ``model`` as it is then. It is called "
            "before and after commits, on the training thread: four looks at once, then as often as takes 3 % of the "
            "time, so let it take no longer than a few inner steps; in evaluation and without gradients, and what it "
            "draws disturbs nothing. When together falls behind what this peer would have learnt alone, health says "
            "so, and why; without it ``peer.log(loss=...)`` tells, which is weaker (docs/diagnostics.md). For a peer "
            "of one process.",
            fits=lambda given: given is None or callable(given),
            rule="it cannot be called; pass a function without arguments that returns the held-out loss of the model "
            "that it is joined with",
        ),
    ]
    moved: Annotated[
        Sequence[str] | None,
        Option(
            None,
            "Names of parameters, or of modules around them, that no gradient trains and the loop itself moves: "
            '``["teacher"]``; an EMA copy, a target network, a codebook. They go the way of buffers: shared as '
            "``buffers`` in ``[model]`` says, kept in checkpoints, brought to newcomers and exported. All peers name "
            "the same. Not given: modules that no optimizer trains and that begin as a copy of one that is trained, up "
            "to 2**24 values; ``[]``: none.",
        ),
    ]


class JoinOptions(LoopOptions, PeerOptions, total=False):
    """All that ``join`` takes beside the run, the model and the optimizer."""


def options_of(declared: type[JoinOptions] | type[PeerOptions]) -> dict[str, Option]:
    """Return the options that a class declares, by their names and in their order."""
    return {name: kind.__metadata__[0] for name, kind in declared.__annotations__.items()}


OPTIONS: Mapping[str, Option] = options_of(JoinOptions)
FOUNDING = ("preset", "rounds", "steps")  # the terms of a run without a file


def check_names(caller: str, given: Mapping[str, object], known: Sequence[str]) -> None:
    """Raise TypeError for an argument that there is not, with the nearest name: at once, and not hours later."""
    for name in given:
        if name not in known:
            from decentral.plugins import nearest  # its reading of other packages would cost every --help 0.02 s

            near = nearest(name, [other for other in known if other[0] == name[0]] or known)
            raise TypeError(f"{caller}() has no argument {name}; {near}")


def complete(given: JoinOptions) -> JoinOptions:
    """Return all options, with the defaults of those not given. Raises ConfigError for a value that does not fit."""
    whole: dict[str, object] = {**{name: option.default for name, option in OPTIONS.items()}, **given}
    for name, value in whole.items():
        check_value("join", name, value)
    return cast(JoinOptions, whole)


def check_value(caller: str, name: str, value: object) -> None:
    """Raise ConfigError for a value that does not fit the option."""
    option = OPTIONS[name]
    if not option.fits(value):
        shown = "..." if option.is_secret else " ".join(repr(value).split())[:60]
        raise ConfigError(f"{caller}({name}={shown}): {option.rule}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of a peer, and what follows from them. Rates in bytes per second."""

    options: JoinOptions = field(repr=False)  # all of them; the token is among them
    manifest: "Manifest"
    invite: "Invite | None"  # None: it founds the run, or resumes what is in ``out``
    model: "LiveModel"
    optimizers: "Together"  # whose ``step`` is hooked
    states: "InnerStates"  # of them, of the schedulers and of random generators
    out: Path  # absolute
    called: Path  # the same as it was written
    identity_path: Path
    give_up_at: float | None  # monotonic s, when it stops looking for others
    caps: "Caps"
    daily_upload: int | None  # bytes
    max_writes: int | None  # bytes a day
    memory: int | None  # bytes; None: as needed
    admit: str | None = field(repr=False)  # the admission token, as given; what the folder keeps is not in it


# ---- join, with its options spelled out ----

F = TypeVar("F", bound=Callable[..., object])

_PLACE = "        options: "  # the line of the docstring in whose place the options are written


def takes_options(join: F) -> F:
    """Show the options in a function's signature and docstring, and let those that are handed over replace its own."""
    first = [one for one in inspect.signature(join).parameters.values() if one.kind is not one.VAR_KEYWORD]
    options = [_parameter(name, option) for name, option in OPTIONS.items()]
    signature = inspect.signature(join).replace(parameters=[*first, *options])

    @wraps(join)
    def with_options(*args: Any, **given: Any) -> object:
        check_names(join.__name__, given, list(signature.parameters))
        return join(**{**signature.bind(*args, **given).arguments, **_handed_over})

    with_options.__signature__ = signature  # type: ignore[attr-defined]  # what help() and notebooks read
    with_options.__doc__ = "".join(map(_with_options, (join.__doc__ or "").splitlines(keepends=True)))
    return cast(F, with_options)


def _parameter(name: str, option: Option) -> inspect.Parameter:
    kind = JoinOptions.__annotations__[name].__origin__
    shown = getattr(kind, "__forward_arg__", kind)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=shown)


def _with_options(line: str) -> str:
    if not line.startswith(_PLACE):
        return line
    return "".join(
        textwrap.fill(f"{name}: {option.text}", 120, initial_indent=" " * 8, subsequent_indent=" " * 12) + "\n"
        for name, option in OPTIONS.items()
    )


# ---- options handed over to a script ----
#
# They are what ``decentral join INVITE --script train.py`` hands to the script's own ``decentral.join``.
#
# A script founds a run, or is told which one to join. The command line knows the invite, the folder and the limits of
# this peer: it hands them over inside the process before it runs the script, and they stand above what the script
# says:
#
#     decentral.join(None, model, optimizer)           # only ever joins what is handed over
#     decentral.join("run.toml", model, optimizer)     # founds the run when nothing is
#
# Set by the command line and nobody else; a library that is told by a hidden variable would be hard to reason about.

_handed_over: dict[str, Any] = {}  # arguments of join by their names; Any: as various as those are


@contextmanager
def handed_over(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Within the block every ``decentral.join`` of this process takes these ``arguments`` instead of its own."""
    _handed_over.update(arguments)
    try:
        yield
    finally:
        _handed_over.clear()
