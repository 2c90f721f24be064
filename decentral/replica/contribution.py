"""The contribution of this peer: what it sends, the residual it leaves, and what was given to rounds that are over."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from decentral.compressors import Nothing
from decentral.compressors.feedback import State, send_more
from decentral.consensus.chain import Head
from decentral.errors import NonFiniteError
from decentral.optimizers.mean import MOST
from decentral.parameters import first_non_finite
from decentral.replica.apply import slice_weights
from decentral.replica.codec import Codec, Encoded, FixedShapes, numel, range_shapes
from decentral.replica.measures import Sample
from decentral.replica.replica import OWED, Replica, in_own_units
from decentral.tensors.device import PROCESSOR, all_beside, on_device_of, to_device
from decentral.tensors.memory import fresh_zeros
from decentral.tensors.ops import difference, is_finite
from decentral.wire.frames import Frame, FrameKind, Header, claims_of, seal
from decentral.wire.keys import PeerId, Signer
from decentral.wire.messages import Offer, Record, ReducePlan

# Shape suffixes: N = elements of one fragment, S = places of its sample; flat float32.


@dataclass(slots=True)
class Contribution:
    """The pseudo-gradient of ``steps`` inner steps on one fragment, offered until a commit names it or passes it by."""

    fragment: int
    based_on: bytes  # hash of the chain's head whose anchor the gradient was measured from
    local_N: Tensor  # the parameters it was measured at
    sent_N: Tensor | None  # see ``gradient_N``; None: made when it is asked for first, of ``base_N`` and ``local_N``
    steps: int  # inner steps since the last contribution, of any fragment
    tokens: int
    kind: FrameKind = FrameKind.CONTRIBUTION  # or MERGE: the parameters themselves, at the end of a gossip run
    progress_N: Tensor | None = None  # anchor - local as it was measured, where that is not what is sent
    trained: int = 0  # inner steps of this fragment behind it: with P fragments P times ``steps``; 0: as ``steps``
    encoded: Encoded | None = None  # gather: made once, sealed anew when a round ends without moving the anchor
    slices: dict[int, dict[int, Encoded]] = field(default_factory=dict)  # reduce: plan number -> part -> slice
    tail: bytes = b""  # this peer's buffers, with fragment 0
    states: tuple[Tensor, ...] = ()  # further channels that are due, each (N,)
    offered: bytes = b""  # what the newest offer of it named: a frame, or the commitment of a reduce
    begun_from: int | None = None  # outer step of the anchor that it began from; None: of the round it is offered in
    summary: bytes = b""  # what the method says of it to every peer, at most MAX_SUMMARY_NBYTES
    unsaid: str = ""  # why that is nothing, where what the method made cannot go beside an offer
    base_N: Tensor | None = None  # the parameters that it was begun from, as written
    is_difference: bool = False  # what is sent is ``base_N - local_N``, bit for bit
    is_finite: bool = False  # gradient_N is known to hold neither NaN nor Inf: nobody need look again
    keeps_owed: set[tuple[int, int]] = field(default_factory=set)  # (round, plan); see ``owed_after``

    def __post_init__(self) -> None:
        self.trained = self.trained or self.steps

    @property
    def gradient_N(self) -> Tensor:
        """Return the change, which is sent: anchor - local, unless the method or an absence says otherwise."""
        made = self.sent_N
        if made is None:  # two threads that ask at once make the same bits
            assert self.base_N is not None, "one of both"
            self.sent_N = made = difference(self.base_N, self.local_N)
        return made

    def let_go(self) -> None:
        """Let go of a vector once it is encoded: it can be made again, and few ask for it after that."""
        if self.is_difference:
            self.sent_N = None

    def change_at(self, sample: Sample) -> Tensor:
        """Return ``gradient_N`` at the places of a sample of the fragment, (S,)."""
        if self.sent_N is None and self.base_N is not None:
            return sample.of(self.base_N) - sample.of(self.local_N)
        return sample.of(self.gradient_N)

    @property
    def vectors(self) -> tuple[Tensor, ...]:
        """Return all channels, the change first."""
        return (self.gradient_N, *self.states)

    @property
    def live_progress_N(self) -> Tensor:
        """Return the progress that it was made of: what its commit takes from the live model's."""
        return self.gradient_N if self.progress_N is None else self.progress_N

    def check_finite(self, replica: Replica) -> None:
        """Raise NonFiniteError, which names the parameter, for NaN or Inf in what is sent."""
        if not self.is_finite:
            check_finite(replica, self.fragment, self.gradient_N)
            self.is_finite = True

    def commitment(self, head: Head) -> bytes:
        """Return what a reduce offer names instead of a frame: it differs wherever the contribution does."""
        made = hashlib.blake2b(to_device(self.gradient_N, PROCESSOR).numpy().data, digest_size=32)
        made.update(struct.pack("<IQ", self.steps, self.tokens) + claims_of(self.base_step(head), self.summary))
        return made.digest()

    def feedback_after(self, record: Record) -> dict[str, Tensor]:
        """Return the feedback to book with ``record``, which names this contribution. Nothing where slices are of a
        previous incarnation, which may have sent all of the residual.
        """
        if self.encoded is not None:
            return self.encoded.feedback
        slices = self.slices.get(record.plan, {})
        made = [slices[part].feedback for part in range(len(record.partition)) if part in slices]
        if len(made) != len(record.partition):
            return {}
        return {name: torch.cat([part[name] for part in made]) for name in made[0]}

    def frame(self, head: Head, signer: Signer) -> Frame:
        """Make the frame for the round after ``head``."""
        assert self.encoded is not None
        header = self._with_claims(header_after(head, self.kind, self.fragment, signer.peer), head)
        frame = seal(header, self.encoded.body, signer, self.tail)
        own = frame.body[: len(self.encoded.body)]  # the frame's own bytes: see Outbox
        self.encoded = replace(self.encoded, body=own)
        _ = frame.hash  # see Inbox.check
        return frame

    def offer(self, head: Head, frame: bytes, nbytes: int) -> Offer:
        """Make the offer for the round after ``head``."""
        assert head.anchor is not None
        return Offer(
            epoch=head.epoch,
            round=head.round + 1,
            fragment=self.fragment,
            base=head.anchor,
            frame=frame,
            nbytes=nbytes,
            steps=self.steps,
            tokens=self.tokens,
            based=self.base_step(head),
            summary=self.summary,
        )

    def base_step(self, head: Head) -> int:
        """Return the outer step of the anchor that it was begun from, were it offered in the round after ``head``."""
        return head.outer_step if self.begun_from is None else self.begun_from

    def _with_claims(self, header: Header, head: Head) -> Header:
        """Add all that the offer says, so that no record can name this contribution and say another thing of it."""
        claims = claims_of(self.base_step(head), self.summary)
        return replace(header, steps=self.steps, tokens=self.tokens, states=len(self.states), claims=claims)

    def slice_frame(self, part: int, plan: ReducePlan, head: Head, replica: Replica, signer: Signer) -> Frame:
        """Make the frame of one part of ``plan``; the residual that it leaves is remembered."""
        owner, start, stop = plan.partition[part]
        passed_on = 0.0
        if owner != signer.peer and replica.owed_as_owner(self.fragment) is not None:
            weights = slice_weights(replica, plan.contributors, head.outer_step)
            passed_on = in_own_units(plan.contributors, weights, signer.peer)
            if replica.method.summary.measures and passed_on > MOST * len(weights):
                passed_on = 0.0  # here weights go by stated norms: a lie would have all others hand on too much
            if not passed_on:
                self.keeps_owed.add((plan.round, plan.number))
        made = encode_range(replica, self.fragment, self.gradient_N, start, stop, passed_on, self.states)
        parts = len(plan.partition)
        header = header_after(head, FrameKind.SLICE, self.fragment, signer.peer, part, parts, plan.number)
        header = self._with_claims(header, head)
        frame = seal(header, made.body, signer, self.tail if replica.tail.nbytes_of(header) else b"")
        self.slices.setdefault(plan.number, {})[part] = replace(made, body=frame.body[: len(made.body)], payloads=())
        return frame


def encode_whole(
    replica: Replica, fragment: int, gradient_N: Tensor, states: Sequence[Tensor] = (), me: PeerId = b""
) -> Encoded:
    """Return the body of a gather frame and the feedback to book with its commit. NonFiniteError names the parameter.

    ``me``: whose frame it is, where receivers remember their senders.
    """
    assert me or not replica.senders.names, "a sender reads from what receivers keep of it"
    remembered = all_beside({**replica.feedback[fragment], **replica.senders.of(fragment, me)}, gradient_N)
    try:
        return replica.codec.encode(gradient_N, remembered, replica.shapes(fragment), states)
    except NonFiniteError:
        check_finite(replica, fragment, gradient_N)
        raise


def encode_range(
    replica: Replica,
    fragment: int,
    gradient_N: Tensor,
    start: int,
    stop: int,
    passed_on: float = 0.0,
    states: Sequence[Tensor] = (),
) -> Encoded:
    """Return the body of one slice of a reduce and its share of the feedback.

    ``passed_on``: how often what this peer owes of the range as an owner goes into it; 0 where it owns it still.
    """
    if not is_finite(gradient_N[start:stop]):
        check_finite(replica, fragment, gradient_N)
    books, slice_N = replica.feedback[fragment], gradient_N[start:stop]
    part: State = {name: on_device_of(books[name][start:stop], gradient_N) for name in books if name != OWED}
    owed_N = books.get(OWED)
    if passed_on and owed_N is not None:
        more_N = on_device_of(owed_N[start:stop], slice_N) * passed_on
        slice_N, part = send_more(replica.codec.feedback, slice_N, part, more_N)
    cut = [state_N[start:stop] for state_N in states]
    return replica.codec.encode(slice_N, part, range_shapes(start, stop), cut)


def check_finite(replica: Replica, fragment: int, gradient_N: Tensor) -> None:
    """Raise NonFiniteError, which names the parameter, for NaN or Inf."""
    culprit = first_non_finite(gradient_N, replica.schema.fragments[fragment])
    if culprit is not None:
        raise NonFiniteError(
            f"NaN or Inf in the pseudo-gradient of {culprit}; nothing was sent: "
            "lower the learning rate or clip the gradients, then start again from the last commit"
        )


def header_after(
    head: Head,
    kind: FrameKind,
    fragment: int,
    sender: PeerId,
    part: int = 0,
    parts: int = 1,
    plan: int = 0,
    steps: int = 0,
    tokens: int = 0,
) -> Header:
    """Make the header of a frame for the round after ``head``, of progress that was begun from its anchor."""
    assert head.anchor is not None
    return Header(
        kind=kind,
        run=head.run,
        epoch=head.epoch,
        round=head.round + 1,
        fragment=fragment,
        part=part,
        parts=parts,
        plan=plan,
        base=head.anchor,
        sender=sender,
        steps=steps,
        tokens=tokens,
        claims=claims_of(head.outer_step, b""),
    )


def range_of(record_or_plan: Record | ReducePlan, part: int) -> FixedShapes:
    """Return the shapes of one partition."""
    _, start, stop = record_or_plan.partition[part]
    return range_shapes(start, stop)


# ---- frames sent in a previous life ----
#
# When a commit names one, a peer gives up some of its own. The feedback to book with a contribution dies with the
# process that made it. Going on with the older one would send again what was sent: where our frame has a value it
# becomes zero, and stays elsewhere, as sparse methods owe it.


def forget_sent(
    replica: Replica, record: Record, frames: Mapping[bytes, Frame], me: PeerId
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the feedback of ``me`` after a commit that names a frame of its lost process, and where that sent
    something, bool (N,). Pure: the caller books.

    All of it goes of a reduce, whose frames are the owners', where receivers remember, and of summaries.
    """
    f, mine = record.fragment, [frames[ref.frame] for ref in record.frames if ref.peer == me]
    unseen = bool(record.contributors) or bool(replica.senders.names) or replica.method.summary.rebuilds
    if unseen or any(frame.header.kind == FrameKind.MERGE for frame in mine):
        return {}, torch.ones(replica.numel(f), dtype=torch.bool, device="cpu")
    sent_N = replica.contents.nonzero(mine, replica.numel(f))
    kept = {name: one_N.masked_fill(on_device_of(sent_N, one_N), 0.0) for name, one_N in replica.feedback[f].items()}
    return kept, sent_N


# ---- what was given to the last rounds ----
#
# It is kept as the others applied it: should those rounds be given up, it is owed again.
#
# Kept compressed, as it was sent: a gather's body is the very bytes the frame store holds, so it costs nothing there.
# Bounded by rounds and by bytes, the oldest dropped first. Not kept over a restart.

ROUNDS = 64  # as many as their frames are kept for others

SentRange = tuple[int, int, bytes | memoryview]  # elements [start, stop) of the fragment, and what was sent of them


@dataclass(frozen=True, slots=True)
class Given:
    """A contribution of this peer that a commit names, as it was sent."""

    fragment: int
    steps: int
    sliced: bool  # for a reduce, which compresses flat ranges; a gather compresses parameter by parameter
    pieces: tuple[SentRange, ...]
    channels: int = 1  # in each of them, the change first

    @property
    def nbytes(self) -> int:
        """Return the bytes that it holds in memory."""
        return sum(len(body) for _, _, body in self.pieces)


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """The sum of what this peer gave to rounds that were given up, over one fragment: it is to be sent again."""

    gradient_N: Tensor
    steps: int
    rounds: int


class Outbox:
    """The contributions of this peer that commits named, by round."""

    def __init__(self, codec: Codec, capacity: int) -> None:
        self.codec = codec
        self.capacity = capacity  # bytes
        self.nbytes = 0
        self._given: OrderedDict[int, Given] = OrderedDict()

    def add(self, record: Record, contribution: Contribution) -> None:
        """Remember what ``record`` took from this peer. What only a summary told is in no frame, and is lost."""
        if contribution.kind != FrameKind.CONTRIBUTION or isinstance(self.codec.compressor, Nothing):
            return
        sliced = contribution.encoded is None
        given = Given(
            contribution.fragment,
            contribution.trained,
            sliced,
            _ranges_sent(record, contribution),
            1 + len(contribution.states),
        )
        self._given[record.round] = given
        self.nbytes += given.nbytes
        while len(self._given) > ROUNDS or (self.nbytes > self.capacity and len(self._given) > 1):
            self.nbytes -= self._given.popitem(last=False)[1].nbytes

    def reclaim(self, after: int, fragment: int, shapes: FixedShapes, sent_N: Tensor | None = None) -> Reclaimed | None:
        """Sum what was given to ``fragment`` in rounds after ``after``; None when that is nothing.

        ``sent_N``: where receivers add up what comes, what they hold of this peer now. Each round applied what they
        held then, so it is the sum of these.
        """
        given = [g for round_, g in self._given.items() if round_ > after and g.fragment == fragment]
        if not given:
            return None
        total_N = fresh_zeros(numel(shapes))
        for one in reversed(given) if sent_N is not None else given:
            came_N = self._decode_change(one, shapes)
            total_N += came_N if sent_N is None else sent_N
            sent_N = None if sent_N is None else sent_N - came_N
        return Reclaimed(total_N, sum(one.steps for one in given), len(given))

    def _decode_change(self, one: Given, shapes: FixedShapes) -> Tensor:
        """Return the change that the others decoded."""
        came_N = fresh_zeros(numel(shapes))
        for start, stop, body in one.pieces:
            cut = range_shapes(start, stop) if one.sliced else shapes
            came_N[start:stop] = self.codec.decode(body, cut * one.channels, one.channels)[: stop - start]
        return came_N

    def forget_after(self, round_: int) -> None:
        """Forget the rounds after ``round_``, which are given up: what they took was reclaimed, or is not known."""
        self._given = OrderedDict((r, given) for r, given in self._given.items() if r <= round_)
        self.nbytes = sum(given.nbytes for given in self._given.values())


def _ranges_sent(record: Record, contribution: Contribution) -> tuple[SentRange, ...]:
    if contribution.encoded is not None:
        return ((0, contribution.local_N.numel(), contribution.encoded.body),)
    made = contribution.slices.get(record.plan, {})
    ranges = enumerate(record.partition)
    return tuple((start, stop, made[part].body) for part, (_, start, stop) in ranges if part in made)
