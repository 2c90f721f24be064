"""Outer steps with the median clip: the same bits whatever was measured before, and no peer moves the anchor far."""

from __future__ import annotations

import pytest
import torch

from decentral.compressors import parse_compressor
from decentral.consensus.chain import Head
from decentral.optimizers import make_aggregation
from decentral.optimizers.aggregation.base import clip_scales, norm
from decentral.optimizers.sparseloco import SparseLoCo
from decentral.parameters import schema_of
from decentral.replica.apply import outer_step
from decentral.replica.codec import Codec
from decentral.replica.reduction import Reduction
from decentral.replica.replica import Replica
from decentral.rounds.inbox import Inbox
from decentral.wire.frames import Frame, FrameKind, Header, seal
from decentral.wire.keys import Signer
from decentral.wire.messages import FrameRef, Record, ReducePlan

SIGNERS = sorted((Signer(bytes([n] * 32)) for n in range(1, 5)), key=lambda signer: signer.peer)
PEERS = tuple(signer.peer for signer in SIGNERS)
SCHEMA = schema_of({"weight": torch.zeros(70, 64, requires_grad=True)})
NUMEL = 70 * 64


def replica(clip: str, chain: str) -> Replica:
    codec = Codec(parse_compressor(chain))
    rule = make_aggregation("norm_clip" if clip == "median" else "mean", {})
    return Replica(SCHEMA, [torch.zeros(NUMEL)], SparseLoCo(), codec, codec, rule=rule)


def sent(lengths: tuple[float, ...]) -> list[torch.Tensor]:
    return [length * torch.randn(NUMEL, generator=torch.Generator().manual_seed(n)) for n, length in enumerate(lengths)]


def round_of(codec: Codec, lengths: tuple[float, ...]) -> tuple[Record, dict[bytes, Frame]]:
    zero, frames, refs = bytes(32), {}, []
    for signer, gradient in zip(SIGNERS, sent(lengths), strict=False):
        header = Header(FrameKind.CONTRIBUTION, zero, 0, 1, 0, 0, 1, 0, zero, signer.peer, 30, 30)
        frame = seal(header, codec.encode(gradient, {}, SCHEMA.fragments[0].shapes).body, signer)
        frames[frame.hash] = frame
        refs.append(FrameRef(signer.peer, frame.hash, 0, 30, 30))
    peers = PEERS[: len(lengths)]
    return Record(zero, 0, 1, 0, 0, 0, zero, zero, peers, tuple(refs), (), (), peers, False), frames


@pytest.mark.parametrize("chain", ["none", "int8", "topk(k=64, chunk=4096) >> signmag2"])
def test_a_clipped_step_has_the_same_bits_with_and_without_what_was_measured_on_arrival(chain):
    given = replica("median", chain)
    record, frames = round_of(given.codec, (1.0, 1e5, 2.0, 1.5))
    alone = outer_step(given, record, frames).digest
    arriving = replica("median", chain)
    inbox = Inbox(SCHEMA, arriving.codec, arriving.merge_codec, unpacked=arriving.contents.unpacked)
    head = Head(bytes(32), 0, 0, 0, bytes(32), bytes(32), PEERS)
    for frame in list(frames.values())[:3]:  # the fourth is this peer's own
        inbox.check(frame.data, head)
        assert arriving.contents.unpacked.measures.get(frame.hash) is not None
    assert outer_step(arriving, record, frames).digest == alone
    assert outer_step(replica("none", chain), record, frames).digest != alone


def test_a_gather_moves_by_what_the_clipped_contributions_make():
    given = replica("median", "none")
    record, frames = round_of(given.codec, (1.0, 1e5, 2.0))
    scales = clip_scales([norm(one) for one in sent((1.0, 1e5, 2.0))])
    wanted = sum(scale * one for scale, one in zip(scales, sent((1.0, 1e5, 2.0)), strict=True)) / 3
    torch.testing.assert_close(-outer_step(given, record, frames).after_N, wanted)


def test_two_contributors_and_a_run_without_the_clip_are_summed_as_ever():
    for clip, lengths in (("median", (1.0, 1e5)), ("none", (1.0, 1e5, 2.0))):
        given, plain = replica(clip, "int8"), replica("none", "int8")
        record, frames = round_of(given.codec, lengths)
        assert outer_step(given, record, frames).digest == outer_step(plain, record, frames).digest


def test_an_owner_of_a_reduce_clips_its_part_by_the_slices():
    codec = Codec(parse_compressor("none"))
    refs = tuple(FrameRef(peer, bytes(32), 0, 30, 30) for peer in PEERS[:3])
    plan = ReducePlan(0, 1, 0, 0, refs, ((PEERS[0], 0, NUMEL),))
    slices = sent((1.0, 1e5, 2.0))
    reduction = Reduction(plan, 0, dict(zip(PEERS, slices, strict=False)))
    scales = clip_scales([norm(one) for one in slices])
    mean = codec.decode(reduction.result(codec, [1.0] * 3, scales=scales).body, ((NUMEL,),))
    assert norm(mean) < 3.0 * norm(slices[0])
