"""What a commit is to those beside the rounds: to the training side an update, to the disk a line of its journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from decentral.consensus.chain import Digest, Head
from decentral.replica.contribution import Contribution
from decentral.wire.keys import PeerId
from decentral.wire.messages import Commit, Record

# Shape suffixes: N = elements of one fragment, B = elements of all shared buffers; flat float32.


@dataclass(frozen=True, slots=True)
class Decision:
    """How a commit came about, as this peer saw it; seconds of the loop's clock."""

    leader: PeerId
    ballot: int  # 0: the round's first leader; each above is a change of leader
    votes: int  # that prove it
    sending: float | None  # s until the others had this peer's frame, or so far; None: none was pushed
    applying: float  # s that the outer step took


@dataclass(frozen=True, slots=True)
class CommittedUpdate:
    """One commit as the training side sees it."""

    record: Record | None  # None: adopted from a snapshot
    head: Digest  # hash of the chain's head after it
    fragment: int
    before_N: Tensor | None  # None: only the membership changed
    after_N: Tensor | None
    contribution: Contribution | None  # this peer's, when the record names it
    anchor: Digest = b""  # digest of this peer's anchor after it, over all fragments
    owed_steps: int = 0  # inner steps of this peer on a branch that is given up, less those that the new one took
    rounds: int = 1  # outer steps of the fragment from ``before_N`` to ``after_N``
    buffers_B: Tensor | None = None  # the model's buffers after it; None: the live ones stay
    state: Mapping[str, Tensor] = field(default_factory=dict)  # the method's after it, if the inner optimizer needs it
    channels: frozenset[str] = frozenset()  # that the contributions had
    unmoved: bool = False  # the commit moved nothing: what it took is given up
    adopted: bool = False  # a snapshot was taken over, for this move or for one that it was joined with
    whole: bool = True  # False: moves of other fragments to the same head follow
    took: bool = False  # adopted: what this peer had in flight was taken, and ``before_N`` is without what it measured
    taken_N: Tensor | None = None  # bool: where progress is in the anchor already, sent by a previous incarnation
    decision: Decision | None = None  # None: adopted


@dataclass(slots=True)
class Ledger:
    """Where commits and acceptor state become durable. In tests it may keep them in memory."""

    append: Callable[[Commit, Sequence[bytes]], None]
    save_acceptor: Callable[[bytes], None]
    keep: Callable[[Record, Sequence[bytes]], None] = lambda record, frames: None  # frames of a record voted for
    adopt: Callable[[Head, Mapping[str, Tensor]], None] = lambda head, tensors: None  # a snapshot, before it is used
    swap_begins: Callable[[], None] = lambda: None  # from now on a partner may hold what the last checkpoint owes
