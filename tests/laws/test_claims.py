"""What contributors say of themselves counts for little: tokens, steps, norms by all methods, buffers by all rules."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decentral.consensus.chain import Head
from decentral.optimizers import Aggregation, OuterMethod
from decentral.optimizers.local_sgd import LocalSGD
from decentral.parameters import schema_of
from decentral.replica.apply import outer_step, slice_weights
from decentral.replica.codec import range_shapes
from decentral.replica.contents import Tail
from decentral.replica.contribution import header_after
from decentral.replica.replica import Replica
from decentral.training.live_side import LiveSide
from decentral.wire.frames import Frame, FrameKind, seal
from decentral.wire.keys import Signer
from decentral.wire.messages import FrameRef, Record
from tests.kit.learners import EXACT
from tests.kit.replicas import NUMEL, PARAMETERS

FIVE = sorted((Signer(bytes([n] * 32)) for n in range(5)), key=lambda signer: signer.peer)
LENGTH = 10.0  # of what each sends
TOKENS, STEPS = 15_000, 30
LIES = {
    "tokens": {"tokens": 10**18},
    "tokens of a 64-bit number": {"tokens": 2**64 - 1},
    "steps": {"steps": 2**32 - 1},
    "no steps": {"steps": 0},
    "tokens in no steps": {"tokens": 10**18, "steps": 0},
    "a tiny norm": {"summary": struct.pack("<d", 1e-300)},
    "a huge norm": {"summary": struct.pack("<d", 1e300)},
    "no norm": {"summary": struct.pack("<d", math.nan)},
    "a summary of anything": {"summary": b"\xff" * 64},
}


ALL = {"partial_updates": struct.pack("<H", 0), "spes": struct.pack("<HH", 0, 1)}  # of peers that train parts


def said(method: OuterMethod, signer: Signer) -> FrameRef:
    """What an honest peer says."""
    summary = ALL.get(method.name, b"")
    if not (summary or method.summary.rebuilds):
        summary = method.summary.says(LiveSide(), 0, [torch.full((NUMEL,), LENGTH / math.sqrt(NUMEL))])
    return FrameRef(signer.peer, signer.peer, 0, STEPS, TOKENS, 0, summary)


def test_one_of_five_that_lies_of_itself_counts_for_four_at_most(outer: OuterMethod):
    replica = Replica(schema_of(PARAMETERS), [torch.zeros(NUMEL)], outer, EXACT, EXACT, weighting="tokens")
    refs = [said(outer, signer) for signer in FIVE]
    for n, (lie, claims) in itertools.product(range(5), LIES.items()):
        told = [replace(ref, **claims) if k == n else ref for k, ref in enumerate(refs)]
        weights = slice_weights(replica, told, 0, [LENGTH / 2] * 5)  # as who sums a quarter of what each sent
        others = [weight for k, weight in enumerate(weights) if k != n]
        assert 0 <= weights[n] <= 4.0 * min(others), lie
        assert min(others) > 0, lie


MODEL = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
SCHEMA = schema_of(MODEL)
HONEST = [torch.full((SCHEMA.buffer_numel,), value) for value in (9.0, 10.0, 11.0, 12.0)]


def round_of(told: Sequence[Tensor], kind: FrameKind, head: Head) -> tuple[Record, dict[bytes, Frame]]:
    """One that names a frame of each of five, with these buffers: a contribution, or the result of a fifth."""
    reduces, numel = kind == FrameKind.RESULT, SCHEMA.fragments[0].numel
    cut = tuple((one.peer, numel * n // 5, numel * (n + 1) // 5) for n, one in enumerate(FIVE)) if reduces else ()
    frames = []
    for n, (one, tail_B) in enumerate(zip(FIVE, told, strict=True)):
        _, start, stop = cut[n] if reduces else (one.peer, 0, numel)
        body = EXACT.encode(torch.ones(stop - start), {}, range_shapes(start, stop)).body
        made = header_after(head, kind, 0, one.peer, n if reduces else 0, 5 if reduces else 1)
        frames.append(seal(made, body, one, Tail.of(SCHEMA, "average").pack(tail_B)))
    refs = tuple(FrameRef(frame.header.sender, frame.hash, frame.header.part, 1, 1) for frame in frames)
    assert head.anchor is not None
    record = Record(
        head.run, 0, 1, 0, 0, 0, head.hash, head.anchor, head.members, refs, refs if reduces else (), cut, head.members,
        False,
    )  # fmt: skip
    return record, {frame.hash: frame for frame in frames}


@pytest.mark.parametrize("policy", ["average", "first"])
@pytest.mark.parametrize("kind", [FrameKind.CONTRIBUTION, FrameKind.RESULT], ids=["gather", "reduce"])
def test_buffers_of_1e30_from_one_of_five_move_the_shared_ones_no_further_than_the_others_differ(
    rule: Aggregation, policy: str, kind: FrameKind
):
    """In the frames of a gather, by every rule; in a reduce from an owner, of what all contributors have."""
    tail, numel = Tail.of(SCHEMA, policy), SCHEMA.fragments[0].numel
    made = {"buffers_B": torch.zeros(tail.numel), "tail": tail, "rule": rule}
    replica = Replica(SCHEMA, [torch.zeros(numel)], LocalSGD(), EXACT, EXACT, **made)
    head = Head.genesis(bytes(32), bytes(32), replica.digest, FIVE[0].peer)
    head = replace(head, members=tuple(signer.peer for signer in FIVE))
    for n in range(5):
        told = [tail.merge(HONEST)] * 4 if kind == FrameKind.RESULT else list(HONEST)
        told.insert(n, torch.full((tail.numel,), 1e30))
        after_B = outer_step(replica, *round_of(told, kind, head)).buffers_B
        assert after_B is not None
        assert (after_B >= 9.0).all()
        assert (after_B <= 21.0 if policy == "first" else after_B <= 15.0).all()
