"""What an outer method is: one frozen dataclass in one file, the whole algorithm.

Its fields are the keys that ``[outer]`` of a manifest accepts for it. ``OuterMethod`` gives the defaults, so a method
states little but its outer step. Nothing outside this folder knows a method by name: a module here, or an entry point
"decentral.optimizers" of another package, is found by itself.

One sign everywhere: the change is anchor - local, a descent direction; an outer step subtracts it. A method whose
equations have the other sign turns it over in ``contribute``. Nothing is mutated, and all results are new tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor

from decentral.optimizers.channels import CHANGE, Channel
from decentral.optimizers.merge import carry
from decentral.optimizers.round_info import Contributor, RoundInfo

__all__ = [
    "ALONE",
    "MAX_SUMMARY_NBYTES",
    "NO_MOMENTS",
    "Live",
    "NoMoments",
    "OuterMethod",
    "Preset",
    "Quorum",
    "State",
    "key",
]

# Shape suffixes: N = elements of one fragment, flat float32; K = contributors, or the peers of a pair that came.

State = Mapping[str, Tensor]
ALONE = RoundInfo()  # of a step that no record names
MAX_SUMMARY_NBYTES = 64  # beside an offer


@dataclass(frozen=True, slots=True)
class Quorum:
    """How many contributions a round waits for."""

    peers: int = 0  # 0: all that are present, within the deadline
    grace: float = 0.0  # s after the quorum in which further ones are still taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """What ``decentral init --preset`` writes into a manifest: everything that a paper puts around its method."""

    hyper: Mapping[str, Any] = field(default_factory=dict)  # keys of [outer] that are the method's own
    compressor: str  # canonical spelling
    feedback: str = "none"  # canonical spelling
    exchange: Literal["reduce", "gather", "pair"]
    fragments: int = 1  # blocks are strided over all but the last, which has the rest; 1: the whole model
    overlap: int = 0  # tau: inner steps between contribution and merge
    norm_clip: Literal["median"] | None = None  # contributions far longer than the typical one are shortened to it
    demo: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))  # tables it changes


def key(default: Any, meaning: str) -> Any:  # Any: as dataclasses.field
    """A field of a method: a key of [outer], with what the manifest's comment says of it."""
    return field(default=default, metadata={"meaning": meaning})


class Live(Protocol):
    """What a method may touch of a peer that trains: the inner optimizer's moments, fragment by fragment."""

    def read_moment(self, name: str, fragment: int) -> Tensor | None:
        """``optimizer.state[...][name]`` over one fragment (N,), a copy; None while there is none."""
        ...

    def write_moment(self, name: str, fragment: int, moment_N: Tensor) -> bool:
        """Overwrite it; False when there is none to overwrite yet."""
        ...


class NoMoments:
    """An inner optimizer that has none, or shows none."""

    def read_moment(self, name: str, fragment: int) -> Tensor | None:
        """None."""
        return None

    def write_moment(self, name: str, fragment: int, moment_N: Tensor) -> bool:
        """Nothing to write."""
        return False


NO_MOMENTS = NoMoments()


class OuterMethod:
    """Defaults of a method in which all peers agree on one anchor, and average what each contributes."""

    __slots__ = ()

    name: ClassVar[str]  # in manifests
    equation: ClassVar[str] = "not described"
    source: ClassVar[str] = "not described"  # authors, title, year, arXiv
    preset: ClassVar[Preset | None] = None
    inner: ClassVar[bool] = False  # whether it reads and writes the inner optimizer's moments
    measures: ClassVar[bool] = False  # whether its weights go by norms, which in a gather all measure themselves
    topology: ClassVar[Literal["all", "pair"]] = "all"  # pair: gossip; each peer has a replica of its own

    # ---- how a round goes ----

    @property
    def quorum(self) -> Quorum:
        """How many contributions a round waits for."""
        return Quorum()

    @property
    def max_staleness(self) -> int:
        """Outer steps of a fragment that may pass a peer by before its progress is dropped (training/absence.py)."""
        return 2

    def channels(self) -> tuple[Channel, ...]:
        """The vectors of a contribution, at most 8."""
        return (CHANGE,)

    # ---- the training side ----

    def contribute(self, anchor_N: Tensor, local_N: Tensor) -> Tensor:
        """The first channel, from the anchor and the live parameters."""
        return anchor_N - local_N

    def states_sent(self, anchor_N: Tensor, live: Live, fragment: int) -> dict[str, Tensor]:
        """The other channels by name, those that are due or more. A channel that is not there is sent as zeros."""
        return {}

    def merge(self, live_N: Tensor, sent_N: Tensor, anchor_N: Tensor) -> Tensor:
        """The live parameters after a commit that names this peer's contribution; ``sent_N``: as they were then."""
        return carry(live_N, sent_N, anchor_N)

    def adopt(self, state: State, live: Live, fragment: int, fresh: Collection[str]) -> bool:
        """Bring the shared state into the inner optimizer, after a commit or when a peer begins.

        ``fresh``: the channels that the commit had; all of them when a peer begins. False: the inner optimizer has no
        place for it yet, ask again after its next step.
        """
        return True

    def summary(self, sent: Sequence[Tensor]) -> bytes:
        """At most 64 bytes beside the offer, from the channels (N,) as they are before compression."""
        return b""

    # ---- the replica's side: the same bits on every peer ----

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """The shared state of one fragment before the first step: flat float32, of any length that is known now."""
        return {}

    def weights(self, contributors: Sequence[Contributor], given: Sequence[float], state: State) -> Sequence[float]:
        """What each contributor counts, float32; ``given``: what [outer] weighting says. All zero, or one of them
        no number from 0 on: nothing moves.
        """
        return given

    def nobody_counts(self, state: State, info: RoundInfo) -> State:
        """The state after a round in which all weights were zero, and nothing moved."""
        return state

    def state_weights(
        self, place: int, contributors: Sequence[Contributor], weights: Sequence[float], state: State
    ) -> Sequence[float]:
        """What each counts in the mean of the vector ``place`` of those sent beside the change, counted from 0.

        All zero: that mean is not received. ``weights``: what each counts in the mean of the changes.
        """
        return weights

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The next anchor and state. ``received``: by channel its mean (N,), or all that came (K, N); only what is due.

        Rows of all are in the order of ``info.contributors``, or in a pair this peer's own first, and alone where no
        partner came. With a reduce there are no rows: "gather" is then the exchange. Nothing moves where the anchor or
        a state is of another shape or dtype than before, or not finite.
        """
        raise NotImplementedError
