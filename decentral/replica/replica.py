"""A peer's part of the run: the anchor and the method's state, alike on all peers, and what this peer owes.

Tensors are replaced, never written to: whoever holds one (a snapshot being served, a round being encoded) has an
immutable copy. All is float32 on the CPU, the same bits on every peer; only what a peer owes lies where it trains.

Shape suffixes: N = elements of one fragment, S = places of its sample, B = elements of all buffers; flat.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from decentral.compressors.feedback import State
from decentral.errors import ConfigError, PayloadError
from decentral.optimizers import Aggregation, Channel, OuterMethod, make_aggregation
from decentral.parameters import Schema, combine_digests, digest
from decentral.replica.codec import Codec, FixedShapes
from decentral.replica.contents import NO_TAIL, FrameContents, Kept, Senders, Tail
from decentral.replica.measures import Measure, Sample
from decentral.state.snapshot import BUFFERS, anchor_name, outer_name
from decentral.tensors.memory import fresh, fresh_zeros
from decentral.wire.keys import PeerId
from decentral.wire.messages import FrameRef, Record


@dataclass(frozen=True, slots=True)
class OuterStep:
    """The result of one commit for a replica, not yet installed."""

    fragment: int
    before_N: Tensor
    after_N: Tensor
    state: dict[str, Tensor]
    digest: bytes  # of after_N
    buffers_B: Tensor | None = None  # after it; None: as before
    kept: Mapping[PeerId, State] = field(default_factory=dict)  # what every receiver keeps of the contributors
    measures: Mapping[PeerId, Measure] = field(default_factory=dict)  # of their estimates, where receivers remember
    channels: frozenset[str] = frozenset()  # of which something came
    came_S: Tensor | None = None  # where in the fragment's sample the change came, bool; None: it did not
    unmoved: str = ""  # why nothing moved, alike on every peer; "": it did
    feedback: dict[str, Tensor] | None = None  # of what this peer contributed, after it; None: as before
    owed_N: Tensor | None = None  # of what it summed for others; None: as before
    taken_N: Tensor | None = None  # bool: where a previous incarnation sent something, which the record took


class Replica:
    """Anchor, outer state and debts of one peer, fragment by fragment; they are replaced, and never written to."""

    def __init__(
        self,
        schema: Schema,
        anchors: Sequence[Tensor],
        method: OuterMethod,
        codec: Codec,
        merge_codec: Codec,
        weighting: str = "equal",
        buffers_B: Tensor | None = None,
        tail: Tail = NO_TAIL,
        rule: Aggregation | None = None,
    ) -> None:
        """``buffers_B``: the model's, in the schema's order; ``tail``: what of them crosses; ``rule``: None: mean."""
        self.rule, self.weighting = rule or make_aggregation("mean", {}), weighting  # by which: equal, or tokens
        self.schema, self.method, self.codec, self.merge_codec = schema, method, codec, merge_codec
        self.anchors: list[Tensor] = list(anchors)
        self.states: list[dict[str, Tensor]] = [method.init(anchor) for anchor in self.anchors]
        self.feedback: list[dict[str, Tensor]] = [{} for _ in self.anchors]  # this peer's own, as sender and owner
        self.senders = Senders(codec.feedback.receiver, [anchor.numel() for anchor in self.anchors])
        self.contents = FrameContents(schema, codec, merge_codec, tail)
        self.samples = [Sample(anchor.numel()) for anchor in self.anchors]
        self.digests: list[bytes] = [digest(anchor) for anchor in self.anchors]
        self.tail, self.buffers_B = tail, fresh(0) if buffers_B is None else buffers_B
        if self.buffers_B.shape != (schema.buffer_numel,):
            raise ConfigError(f"Replica: {len(self.buffers_B)} values of buffers, the schema has {schema.buffer_numel}")
        tail.pack(self.buffers_B)  # what could not be sent is refused here, and not after the first inner steps

    @property
    def digest(self) -> bytes:
        """The anchor's digest over all fragments, and the buffers where there are any."""
        return self._combine_digests(self.digests, self.buffers_B)

    def digest_of(self, tensors: Mapping[str, Tensor]) -> bytes:
        """Return what ``digest`` would be with these ``shared_tensors`` of another peer."""
        digests = [digest(tensors[anchor_name(f)]) for f in range(len(self.anchors))]
        return self._combine_digests(digests, tensors.get(BUFFERS, self.buffers_B))

    def _combine_digests(self, digests: Sequence[bytes], buffers_B: Tensor) -> bytes:
        return combine_digests([*digests, digest(buffers_B)] if self.schema.buffers else digests)

    def shared_buffers(self, fragment: int) -> Tensor | None:
        """Return what the live buffers become when ``fragment`` has moved; None: they stay."""
        return self.buffers_B if self.tail.nbytes(fragment) else None

    def shapes(self, fragment: int) -> FixedShapes:
        """Shapes of what the codec takes for one tensor each, of a fragment."""
        return self.codec.cut(self.schema.fragments[fragment])

    def numel(self, fragment: int) -> int:
        """Elements of a fragment."""
        return self.schema.fragments[fragment].numel

    @property
    def agrees(self) -> bool:
        """True where all peers hold the same: not where each of a pair has a replica of its own."""
        return self.method.topology == "all"

    def due(self, outer_step: int) -> tuple[Channel, ...]:
        """The channels of a contribution to outer step ``outer_step`` of the run, counted from 0."""
        step = outer_step // len(self.anchors)
        return tuple(channel for channel in self.method.channels() if channel.is_due(step))

    def owed_as_owner(self, fragment: int) -> Tensor | None:
        """Return what this peer owes as an owner of a reduce, over the whole fragment."""
        return self.feedback[fragment].get(OWED)

    def owe(self, fragment: int, owed_N: Tensor | None) -> None:
        """Book what this peer owes as an owner; None: as before."""
        if owed_N is not None:
            self.feedback[fragment] = {**self.feedback[fragment], OWED: owed_N}

    def install(self, step: OuterStep) -> None:
        """Make an outer step this replica's state, and its books this peer's."""
        self.anchors[step.fragment] = step.after_N
        self.states[step.fragment] = step.state
        self.digests[step.fragment] = step.digest
        self.senders.book(step.fragment, step.kept)
        self.buffers_B = self.buffers_B if step.buffers_B is None else step.buffers_B
        if step.feedback is not None:
            self.feedback[step.fragment] = step.feedback
        self.owe(step.fragment, step.owed_N)

    # ---- what a checkpoint or a snapshot holds ----

    def shared_tensors(self) -> dict[str, Tensor]:
        """Anchor, outer state, buffers and what is kept of senders: what every peer holds alike."""
        named = name_shared_tensors(self.anchors, self.states, self.buffers_B if self.schema.buffers else None)
        return named | self.senders.tensors()

    def outer_tensors(self) -> dict[str, Tensor]:
        """The method's state and what is kept of senders: held alike beside the anchor, and no digest covers it."""
        named = {outer_name(f, key): tensor for f, state in enumerate(self.states) for key, tensor in state.items()}
        return named | self.senders.tensors()

    def own_tensors(self) -> dict[str, Tensor]:
        """The feedback, debts for instance: this peer's alone."""
        return own_names(self.feedback)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over ``shared_tensors`` and, when they are there, ``own_tensors``; all or nothing.

        Raises PayloadError when a tensor is missing or has another size, or is of a sender that cannot be.
        """
        self.take_over(self.read(tensors))

    def read(self, tensors: Mapping[str, Tensor]) -> Loaded:
        """Return what ``load`` would take over, with its digests: hashing takes time, and nothing changes yet."""
        anchors = [read_tensor(tensors, anchor_name(f), anchor) for f, anchor in enumerate(self.anchors)]
        states = read_states(tensors, self.states)
        buffers_B = read_tensor(tensors, BUFFERS, self.buffers_B) if self.schema.buffers else self.buffers_B
        own = (*self.codec.own_names, OWED)
        feedback = read_feedback(tensors, own, len(anchors))
        senders = self.senders.read_tensors(tensors)
        return Loaded(anchors, states, feedback, senders, buffers_B, [digest(anchor) for anchor in anchors])

    def take_over(self, loaded: Loaded) -> None:
        """Hold what was ``read``, and nothing else."""
        self.senders.take_over(loaded.senders)
        self.anchors, self.states, self.feedback = loaded.anchors, loaded.states, loaded.feedback
        self.buffers_B, self.digests = loaded.buffers_B, loaded.digests


# ---- debts of an owner of a reduce ----
#
# It owes what compressing its results lost, in units of the mean.
#
# The contributors have struck it off their books, so nobody else has it. It is added to the next result that this peer
# makes of the same elements, and booked with the commit that names the result, never before: a plan that is made again
# begins from the same debt.
#
# Ranges move from round to round, with the uplinks as they are measured. What is owed of elements that another peer
# owns now goes into this peer's own slice for them, times the number of contributors, so that the mean has it in full.
# Kept until this peer owns them again, it might be never; and a slice is booked like all that this peer sends. Where
# it counts nothing, or next to nothing, nothing is handed on, and it is owed still.
#
# An owner that dies takes its debt along, as a contributor does; so does one whose rounds are given up, for
# contributors then owe again all that went into them.

OWED = "owed"  # its name beside the sender's feedback
# Of all weights, with which a contributor still hands on: beyond it float32 would lose its own change.
LEAST_SHARE = 2.0**-20


def in_own_units(contributors: Sequence[FrameRef], weights: Sequence[float], me: PeerId) -> float:
    """Return a unit of the mean in units of the contribution of ``me``: the number of contributors, when all weigh the
    same.

    0 where that is beyond all bounds, for ``me`` counts nothing: then nothing is to be handed on.
    """
    own = next(weight for ref, weight in zip(contributors, weights, strict=True) if ref.peer == me)
    total = math.fsum(weights)
    return total / own if own > LEAST_SHARE * total else 0.0


def owed_after(
    owed_N: Tensor | None, record: Record, me: PeerId, made: Mapping[bytes, Tensor], numel: int, keeps: bool = False
) -> Tensor | None:
    """Return what ``me`` owes as an owner once ``record`` is applied, new; None when that is nothing new.

    ``keeps``: the slices that ``me`` contributed handed nothing on.

    ``made``: by the hashes of the results that this process made, what each leaves to owe. Of one that a previous
    incarnation made nobody knows, and its elements are owed no more, rather than twice.
    """
    if not record.partition:
        return None
    mine = [(record.partition[ref.part], made.get(ref.frame)) for ref in record.frames if ref.peer == me]
    if owed_N is None and not any(left_N is not None for _, left_N in mine):
        return None
    slices_took_the_rest = not keeps and any(ref.peer == me for ref in record.contributors)
    after_N = fresh_zeros(numel) if owed_N is None or slices_took_the_rest else owed_N.clone()
    for (_, start, stop), left_N in mine:
        after_N[start:stop] = 0.0 if left_N is None else left_N
    return after_N


# ---- names in checkpoints and snapshots, and the way back ----
#
# Shared are the anchor, the outer state and the buffers, which every peer holds alike; own is the feedback, which is
# in no snapshot.

States = Sequence[Mapping[str, Tensor]]  # a fragment each
_FEEDBACK = "feedback/"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A replica as it was read, a fragment each, checked and not yet taken over."""

    anchors: list[Tensor]
    states: list[dict[str, Tensor]]
    feedback: list[dict[str, Tensor]]  # this peer's own; {} where a snapshot of another is loaded
    senders: list[Kept]
    buffers_B: Tensor
    digests: list[bytes]  # of the anchors


def name_shared_tensors(anchors: Sequence[Tensor], states: States, buffers_B: Tensor | None) -> dict[str, Tensor]:
    """The tensors that every peer holds alike; ``buffers_B`` is None where the schema has none."""
    named = {anchor_name(f): anchor for f, anchor in enumerate(anchors)}
    if buffers_B is not None:
        named[BUFFERS] = buffers_B
    for f, state in enumerate(states):
        named |= {outer_name(f, key): tensor for key, tensor in state.items()}
    return named


def own_names(feedback: States) -> dict[str, Tensor]:
    """The feedback, debts for instance: this peer's alone."""
    return {feedback_name(f, name): tensor for f, own in enumerate(feedback) for name, tensor in own.items()}


def read_states(tensors: Mapping[str, Tensor], like: States) -> list[dict[str, Tensor]]:
    """The outer state of each fragment. Raises PayloadError when a tensor is missing or has another size."""
    return [
        {key: read_tensor(tensors, outer_name(f, key), tensor) for key, tensor in state.items()}
        for f, state in enumerate(like)
    ]


def read_feedback(tensors: Mapping[str, Tensor], names: Iterable[str], num_fragments: int) -> list[dict[str, Tensor]]:
    """The feedback of each fragment, as far as it is there."""
    keys = [{name: feedback_name(f, name) for name in names} for f in range(num_fragments)]
    return [{name: tensors[key] for name, key in own.items() if key in tensors} for own in keys]


def read_tensor(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """Return a tensor. Raises PayloadError when it is missing or has another shape or dtype than ``like``."""
    tensor = tensors.get(name)
    if tensor is None or tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise PayloadError(f"state lacks {name} of shape {tuple(like.shape)}; use another donor or checkpoint")
    return tensor


def feedback_name(fragment: int, name: str) -> str:
    """Name of a fragment's feedback in a checkpoint; feedback is never in a snapshot."""
    return f"{_FEEDBACK}{fragment}/{name}"


def is_feedback(name: str) -> bool:
    """Return whether a tensor of a checkpoint is some fragment's feedback."""
    return name.startswith(_FEEDBACK)
