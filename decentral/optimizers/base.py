"""An outer method: one frozen dataclass that is the whole algorithm, and what it may see of rounds and peers.

Its fields are the keys that ``[outer]`` of a manifest accepts for it. ``OuterMethod`` gives the defaults, so a method
states little but its outer step. Nothing outside this folder knows a method by name: one in a module here, or behind an
entry point "decentral.optimizers" of another package, is found by itself.

One sign everywhere: the change is anchor - local, a descent direction; an outer step subtracts it. A method whose
equations have the other sign turns it over in ``contribute``. Nothing is mutated, and all results are new tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.mean import Part, Span
from decentral.optimizers.steps import carry, progress

__all__ = [
    "ALL_DRAWN",
    "ALONE",
    "CHANGE",
    "MAX_SUMMARY_NBYTES",
    "NO_MOMENTS",
    "PROPOSED",
    "SILENT",
    "Channel",
    "Contributor",
    "Derivative",
    "Drawn",
    "InnerOptimizer",
    "Interval",
    "Layout",
    "Live",
    "Local",
    "NoMoments",
    "OuterMethod",
    "Own",
    "Part",
    "Preset",
    "RoundInfo",
    "Shared",
    "Span",
    "Speaking",
    "State",
    "Summary",
    "Timing",
    "compressor_beside",
    "key",
    "keys_of",
    "numel_of",
    "rate",
]

# ---- channels of a contribution ----
#
# A contribution carries named vectors, each as long as the fragment.


@dataclass(frozen=True, slots=True)
class Channel:
    """A vector of a contribution. The first channel of a method is a flow unless it is a replica; others are states.

    Of a flow, what compression loses is owed and sent later (error feedback), and a norm clip shortens it. A state is
    sent whole again next time, so that nothing of it is owed. A replica is a state of a pair: parameters, which both
    tell each other, and on which their disagreement is measured.
    """

    name: str
    every: int = 1  # outer steps of a fragment from one time that it is sent to the next; the first channel: 1
    combine: Literal["mean", "each"] = "mean"  # each: the outer step sees all that came, see OuterMethod.outer_step
    is_replica: bool = False
    compressor: str | None = None  # a spelling; None: the run's, as always of the first channel

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"channel {self.name}: every = {self.every}; want 1 or more outer steps")

    def is_due(self, step: int) -> bool:
        """Return whether it is sent in outer step ``step`` of a fragment, counted from 0."""
        return (step + 1) % self.every == 0


def compressor_beside(channels: Sequence[Channel]) -> str | None:
    """Return the compressor of the channels beside the first; None: the run's compressor.

    ConfigError unless it is the same for all of them: a frame says how many channels it has, and not which.
    """
    first, *others = channels
    if first.compressor is not None:
        raise ConfigError(f"channel {first.name}: compressor = {first.compressor!r}; the first channel has the run's")
    if len({one.compressor for one in others}) > 1:
        told = ", ".join(f"{one.name}: {one.compressor or 'as the run'}" for one in others)
        raise ConfigError(f"compressors of channels differ ({told}); give all channels beside the first the same one")
    return others[0].compressor if others else None


CHANGE = Channel("change")
"""What inner steps did to the parameters: anchor - local, a descent direction, unless the method says otherwise."""

PROPOSED = Channel("proposed", combine="each", is_replica=True)
"""The one vector of a gossip method that keeps its change to itself: where it would go alone (OuterMethod.proposal)."""


# ---- what the record says of a round ----
#
# All that an outer step may know of its round: the same on every peer, for it comes from the record.


@dataclass(frozen=True, slots=True)
class Contributor:
    """A peer whose contribution a record names."""

    peer: bytes
    tokens: int = 0  # behind it, as the peer says
    steps: int = 0  # inner steps behind it, as the peer says
    age: int = 0  # outer steps of the fragment that passed since its progress began
    summary: bytes = b""  # what the method's ``summary`` made of it at its sender
    norm: float | None = None  # of its change as every peer decoded it: in a gather, where the method ``measures``
    part: float | None = None  # of what of it an owner of a reduce sums: known to that owner, where the same holds


@dataclass(frozen=True, slots=True)
class RoundInfo:
    """An outer step of one fragment."""

    step: int = 0  # of this fragment, counted from 0
    contributors: tuple[Contributor, ...] = ()  # by peer id; none where a peer of a pair steps alone
    weights: tuple[float, ...] = ()  # what each counted
    shapes: tuple[tuple[int, ...], ...] = ()  # of the fragment's tensors, in order: together they are the flat vector
    names: tuple[str, ...] = ()  # of those tensors in the model
    members: int = 0  # peers of the swarm in the record's epoch, whether they contributed or not; 0 without a record


# ---- a peer that trains ----
#
# A method may see and change a peer's parameters and its inner optimizer, and keep notes of its own.
#
# All of it is this peer's alone. What all peers hold alike is the shared state of ``OuterMethod.init``.

# Shape suffix: N = elements of one fragment, flat float32, on the processor.

Layout = dict[str, tuple[int, ...]]
Own = dict[str, Tensor]  # tensors are replaced, never written to: a contribution in flight remembers the ones it had


def numel_of(layout: Layout) -> int:
    """Elements of a fragment."""
    return sum(math.prod(shape) for shape in layout.values())


@dataclass(frozen=True, slots=True)
class Derivative:
    """A derivative of the loss along a random direction of all fragments: see `decentral.optimizers.just_one_byte`."""

    seed: int
    number: int
    byte: int  # which says how large it is


class InnerOptimizer(Protocol):
    """Moments and gradients, fragment by fragment."""

    def read_moment(self, name: str, fragment: int) -> Tensor | None:
        """``optimizer.state[...][name]`` over one fragment (N,), a copy: zeros where a parameter has none; None while
        none has, or the first step is still to make it.
        """
        ...

    def write_moment(self, name: str, fragment: int, moment_N: Tensor) -> bool:
        """Overwrite it where it is; False when there is none to overwrite yet."""
        ...

    def read_gradient(self, fragment: int) -> Tensor | None:
        """Return a copy of the next inner step's gradient (N,), zero where there is none; None where none is shown."""
        ...

    def add_to_gradient(self, fragment: int, added_N: Tensor) -> None:
        """Let the next inner step go by so much more; for ``before_inner_step``, as there the gradients are made."""
        ...

    @property
    def derivatives(self) -> Sequence[Derivative] | None:
        """The derivatives that the last inner step went by; None where inner steps go by gradients."""
        ...


class Live(InnerOptimizer, Protocol):
    """A peer that trains."""

    @property
    def peer(self) -> bytes:
        """Its id, as records name it."""
        ...

    @property
    def loss(self) -> float | None:
        """The newest training loss that the loop logged; None: it logged none."""
        ...

    def layout(self, fragment: int) -> Layout:
        """The tensors of a fragment, in order: by name in the model their shapes. Empty where no model is known."""
        ...

    def read(self, fragment: int) -> Tensor:
        """The live parameters of a fragment (N,), a copy."""
        ...

    def write(self, fragment: int, live_N: Tensor) -> None:
        """Overwrite them."""
        ...

    def steps(self, fragment: int) -> int:
        """Inner steps behind the next contribution of a fragment."""
        ...

    def counted(self, fragment: int) -> int:
        """How many of them the one that is being taken stands for: fewer after an absence, all of them else."""
        ...

    def own(self, fragment: int) -> Own:
        """Tensors of the method's, by names of its choice: in this peer's checkpoints, never in a snapshot."""
        ...


class NoMoments:
    """An inner optimizer that has none, or shows none."""

    derivatives = None

    def read_moment(self, name: str, fragment: int) -> Tensor | None:
        """None."""
        return None

    def write_moment(self, name: str, fragment: int, moment_N: Tensor) -> bool:
        """Nothing to write."""
        return False

    def read_gradient(self, fragment: int) -> Tensor | None:
        """None."""
        return None

    def add_to_gradient(self, fragment: int, added_N: Tensor) -> None:
        """Nothing to add to."""


NO_MOMENTS = NoMoments()


# ---- keys and presets in manifests ----

_SPELLED = MappingProxyType({"lr": "learning_rate"})  # a field's name where the manifest has another one


@dataclass(frozen=True, slots=True)
class Interval:
    """The values that a key may have, as papers write them: "[0, 1)" has 0 and not 1; no interval has NaN."""

    text: str

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the largest; ``str`` says which of them are meant, too."""
        low, high = self.text[1:-1].split(",")
        return float(low), float(high)

    def __contains__(self, value: float) -> bool:
        low, high = self.ends
        above = value >= low if self.text[0] == "[" else value > low
        return above and (value <= high if self.text[-1] == "]" else value < high)

    def __str__(self) -> str:
        low, high = self.text[1:-1].split(", ")
        if high != "inf":
            return f"must be in {self.text}"
        least = f"must be {'at least' if self.text[0] == '[' else 'above'} {low}"
        return least if self.text[-1] == "]" else f"{least} and finite"


def key(default: Any, meaning: str, example: Any = None, *, within: str = "") -> Any:  # Any: as dataclasses.field
    """A field of a method: a key of [outer], with what the manifest's comment says of it.

    ``example``: what the comment shows where the default is None, which TOML has no word for. ``within``: the interval
    that a value must be in, such as "[0, 1)".
    """
    told = {"meaning": meaning, "example": default if example is None else example}
    return field(default=default, metadata=told | ({"within": Interval(within)} if within else {}))


def rate(default: float | None) -> Any:  # Any: as key
    """The field ``lr`` of a method: the run's outer learning rate."""
    return field(default=default, metadata={"within": Interval("(0, inf)")})


def keys_of(method: OuterMethod) -> dict[str, Any]:  # Any: as key
    """A method's keys of [outer] and their values, as manifests spell them; those that are unset are not there."""
    given = {one.name: getattr(method, one.name) for one in fields(method)}  # type: ignore[arg-type]  # each is one
    return {_SPELLED.get(name, name): value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The terms that ``decentral init --preset`` writes into a manifest: everything that a paper puts around its
    method.
    """

    hyper: Mapping[str, Any] = field(default_factory=dict)  # keys of [outer] that are the method's own
    compressor: str  # canonical spelling
    feedback: str = "none"  # canonical spelling
    exchange: Literal["reduce", "gather", "pair"]
    fragments: int = 1  # blocks are strided over all but the last, which has the rest; 1: the whole model
    overlap: int = 0  # tau: inner steps between contribution and merge
    norm_clip: Literal["median"] | None = None  # contributions far longer than the typical one are shortened to it
    inner: Mapping[str, Any] = field(default_factory=dict)  # of [inner]: a method may live from its inner optimizer
    model: Mapping[str, Any] = field(default_factory=dict)  # keys of [model]: a method may be for one kind of them
    demo: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))  # tables it changes
    behind: str = ""  # a sentence for who takes it, where it was not better than a peer alone: docs/optimizers.md


# ---- a method, in two contracts ----
#
# `OuterMethod` has the defaults of both: a method states what it does otherwise, DiLoCo one function and a state.

# Shape suffixes: N = elements of one fragment, flat float32; K = contributors, or the peers of a pair that came.

State = Mapping[str, Tensor]
ALONE = RoundInfo()  # of a step that no record names
MAX_SUMMARY_NBYTES = 64  # beside an offer


@dataclass(frozen=True, slots=True)
class Timing:
    """When a contribution is due, how many of them a round waits for, and how late one may be."""

    quorum: int = 0  # contributions that a round waits for; 0: all that are present, within the deadline
    grace: float = 0.0  # s after the quorum in which further ones are still taken
    staleness: int = 2  # outer steps of a fragment that may pass a peer by before its progress is dropped
    seconds: float = math.inf  # of training after which a contribution is due, though H steps are not over
    least_steps: int = 1  # that such a one has behind it

    @property
    def is_by_time(self) -> bool:
        """True where contributions are due by other than inner steps."""
        return self.seconds < math.inf

    def is_due(self, steps: int, seconds: float, most: int) -> bool:
        """Return whether to contribute, ``steps`` inner steps and ``seconds`` of training since the last time;
        ``most``: H, or a fragment's share of it.
        """
        return steps >= most or (seconds >= self.seconds and steps >= self.least_steps)


@dataclass(frozen=True, slots=True)
class Drawn:
    """The parameters that a round speaks of, and the rounds behind what peers learnt of them: an absence goes by it."""

    places: Callable[[int], Tensor] | None = None  # of so many parameters those that are drawn, bool (N,); None: all
    rounds: int = 1  # behind it where none was missed
    most_rounds: int = 1  # and in any step


ALL_DRAWN = Drawn()


class Shared:
    """The replica's side: deterministic, float32 on the processor, the same bits on every peer."""

    __slots__ = ()

    def channels(self) -> tuple[Channel, ...]:
        """Return the vectors of a contribution, at most 8."""
        return (CHANGE,)

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """Return the shared state of a fragment before the first step: flat float32, of any length known by now."""
        return {}

    def weights(self, contributors: Sequence[Contributor], given: Sequence[float], state: State) -> Sequence[float]:
        """Return the weight of each contributor, float32; ``given``: by [outer] weighting. Where all are zero, or one
        of them is no number from 0 on, nothing moves.
        """
        return given

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the next anchor and state. ``received``: by channel that is due its mean (N,), or rows of all (K, N).

        Rows of all are in the order of ``info.contributors``, or in a pair this peer's own first, and alone where no
        partner came. With a reduce there are no rows: "gather" is then the exchange. Where the first channel is a
        replica, "change" is there beside it: this peer's own, which no compressor has touched. Nothing moves where the
        anchor or a state is of another shape or dtype than before, or not finite.
        """
        raise NotImplementedError

    def nobody_counts(self, state: State, info: RoundInfo) -> State:
        """Return the state after a round in which all weights were zero, and nothing moved."""
        return state

    def proposal(self, anchor: Tensor, change: Tensor, state: State) -> Tensor:
        """Return what a gossip method sends whose first channel is a replica, made of this peer's own change."""
        return change

    @property
    def timing(self) -> Timing:
        """When contributions are due, and how rounds wait for them."""
        return Timing()

    def drawn(self, step: int) -> Drawn:
        """Return the parameters that contributions to outer step ``step`` of a fragment speak of.

        The first channel has nothing of the others, and what a peer learnt of them stays in its live model.
        """
        return ALL_DRAWN

    def meets(self, step: int) -> bool:
        """Return whether pairs of a gossip method swap in outer step ``step`` of a fragment; else each peer steps
        alone.
        """
        return True


class Local:
    """A peer's own side: from its live parameters to what it sends, and from a commit to them, on the model's device.

    Beside that, what happens around its inner steps, and what it keeps of them in ``live.own``.
    """

    __slots__ = ()

    def contribute(self, anchor_N: Tensor, local_N: Tensor) -> Tensor:
        """Return the first channel, from the anchor and the live parameters."""
        return progress(anchor_N, local_N)

    def states_sent(self, anchor_N: Tensor, live: Live, fragment: int) -> dict[str, Tensor]:
        """Return the other channels by name, those due or more. A channel that is not there is sent as zeros."""
        return {}

    def merge(self, live_N: Tensor, sent_N: Tensor, anchor_N: Tensor) -> Tensor:
        """Return the live parameters after a commit of this peer's contribution; ``sent_N``: as it was taken."""
        return carry(live_N, sent_N, anchor_N)

    def meanwhile(self, live: Live, fragment: int, anchor_N: Tensor, local_N: Tensor) -> Tensor | None:
        """Return where training goes on while the contribution just taken is in flight; None: where it is.

        Not asked where a round is waited for. Once the round is decided what is learnt there is carried on as ever, and
        the way there taken out. What it notes in ``live.own`` is in the ``sent`` of `after_commit`.
        """
        return None

    def adopt(self, state: State, live: Live, fragment: int, fresh: Collection[str]) -> bool:
        """Bring the shared state into the inner optimizer, after a commit or when a peer begins.

        ``fresh``: the channels that the commit had; all of them when a peer begins. False: the inner optimizer has no
        place for it yet, ask again after its next step.
        """
        return True

    def before_inner_step(self, live: Live, fragment: int) -> None:
        """Act once the gradients are made, before a parameter moves."""

    def after_inner_step(self, live: Live, fragment: int) -> None:
        """Act once the parameters have moved."""

    def after_commit(self, live: Live, fragment: int, state: State, sent: State | None, peers: Sequence[bytes]) -> None:
        """Act on a commit that is in the live model. It took contributions of ``peers``, in the record's order: none in
        a pair, nor where it is a branch that was adopted, as its records are not there.

        The one place to change ``own`` because something was sent: a contribution may still be refused. ``sent``:
        ``own`` as it was when the contribution that the commit took was taken, and inner steps may have been made
        since; None: it took none of this peer's. ``state``: the shared one after the commit, none in a pair.
        """

    def progress_lost(self, live: Live, fragment: int) -> None:
        """Drop what inner steps did since a commit last took some of it: it is given up, or counted otherwise."""


# ---- what a peer says beside an offer ----


class Summary:
    """The 64 signed bytes, at most, that a peer says of a contribution, and their use by all who apply a record.

    Of a method that derives from `Speaking`; all others are silent.
    """

    __slots__ = ()

    measures: ClassVar[bool] = False  # whether weights go by norms, which who has the change measures
    divides: ClassVar[bool] = False  # peers train different parts of the model: no two changes tell of one another
    rebuilds: ClassVar[bool] = False  # contributions are made of summaries, and frames are empty: see ``rebuilt``
    most_steps: ClassVar[int | None] = None  # inner steps that a contribution can tell of; None: any number

    def says(self, live: Live, fragment: int, sent: Sequence[Tensor]) -> bytes:
        """Return the summary, of this peer or of the channels (N,) as they are before compression."""
        return b""

    def outside(self, contributor: Contributor, layout: Layout) -> Sequence[Span]:
        """Return where in a fragment, as (start, stop), the first channel of this contributor counts nothing.

        Of a method that ``divides``: the parts that it does not say to have trained.
        """
        return ()

    def rebuilt(self, told: Contributor, layout: Layout) -> Tensor:
        """Return the change (N,) of a contributor, of a method that sends none: made of its summary alone, whatever
        that holds. ``layout``: the tensors of the fragment. Frames of such a method are empty.
        """
        raise NotImplementedError

    def state_weights(
        self, place: int, contributors: Sequence[Contributor], weights: Sequence[float], state: State
    ) -> Sequence[float]:
        """Return the weight of each in the mean of the vector ``place`` of those sent beside the change, counted from
        0.

        All zero: that mean is not received. ``weights``: what each counts in the mean of the changes.
        """
        return weights

    def told_loss(self, contributor: Contributor) -> float | None:
        """Return the training loss that a contributor's summary tells, where the method's `says` puts ``live.loss``
        there.

        None: it tells none. For people only: how far losses differ is shown, and the run does not depend on it.
        """
        return None


SILENT = Summary()


# ---- the method itself ----

_AT_TRAINING = (  # hooks that are given tensors of one peer's training, or make some to go with them
    "drawn",
    "contribute",
    "states_sent",
    "merge",
    "meanwhile",
    "adopt",
    "summary",
    "before_inner_step",
    "after_inner_step",
    "after_commit",
    "progress_lost",
)


class OuterMethod(Shared, Local):
    """Defaults of a method in which all peers agree on one anchor, and average what each contributes.

    ``str()`` is how errors speak of it: "diloco(momentum=1.5)".
    """

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in keys_of(self).items())})"

    def __post_init__(self) -> None:
        """ConfigError unless each key is within its interval; a method that checks more calls this first."""
        for one in fields(self):  # type: ignore[arg-type]  # each method is a dataclass
            value, within = getattr(self, one.name), one.metadata.get("within")
            if within is not None and value is not None and value not in within:
                usual = one.metadata.get("example", one.default)
                raise ConfigError(f"{self}: {one.name} {within}" + (f"; {usual} is usual" if usual else ""))

    name: ClassVar[str]  # in manifests
    equation: ClassVar[str] = "not described"
    source: ClassVar[str] = "not described"  # authors, title, year, arXiv
    preset: ClassVar[Preset | None] = None
    inner: ClassVar[bool] = False  # it touches a peer's training; true by itself with hooks around inner steps
    acts_before_steps: ClassVar[bool] = False  # as the next two: set by what the class states
    acts_after_commits: ClassVar[bool] = False
    draws: ClassVar[bool] = False  # rounds speak of some parameters
    by_gradients: ClassVar[bool] = False  # it reads or turns the gradients that inner steps go by
    begins_apart: ClassVar[bool] = False  # it is for replicas that begin apart: in studies, as no run's do
    topology: ClassVar[Literal["all", "pair"]] = "all"  # pair: gossip; each peer has a replica of its own
    on_device: ClassVar[bool] = True  # whether its training side takes tensors of any device; see __init_subclass__

    def __init_subclass__(cls, **given: Any) -> None:
        """Set what others ask of a method by what the class states, and ``on_device`` where it does not say it: a hook
        of the training side wants tensors on the processor, as a gossip method's own change goes into its replica.
        """
        super().__init_subclass__(**given)
        defaults = (*OuterMethod.__mro__, Summary)
        states = {name for one in cls.__mro__ if one not in defaults for name in vars(one)}
        if gone := sorted(states & {"quorum", "is_due"}):
            raise ConfigError(f"{cls.__name__}.{gone[0]}: nobody asks it any more; declare `timing` (Timing) instead")
        cls.acts_before_steps = "before_inner_step" in states
        cls.acts_after_commits = not states.isdisjoint(("adopt", "after_commit"))
        cls.draws = "drawn" in states
        cls.inner = cls.inner or not states.isdisjoint(("before_inner_step", "after_inner_step"))
        if "on_device" not in vars(cls):
            cls.on_device = cls.topology == "all" and states.isdisjoint(_AT_TRAINING)

    @property
    def summary(self) -> Summary:
        """The summary that its peers send beside an offer."""
        return SILENT


class Speaking(Summary, OuterMethod):
    """An outer method whose peers say something beside an offer."""

    __slots__ = ()

    @property
    def summary(self) -> Summary:
        """Its own."""
        return self
