"""Replicas of a sparse and of a dense run with aggregation rules, and rounds of drawn values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decentral.compressors import parse_compressor
from decentral.optimizers import Aggregation
from decentral.optimizers.shared_moments import DESLoc
from decentral.optimizers.sparseloco import SparseLoCo
from decentral.parameters import schema_of
from decentral.replica.codec import Codec
from decentral.replica.replica import Replica
from decentral.training.live_side import LiveSide
from decentral.wire.frames import Frame, FrameKind, Header, seal
from decentral.wire.keys import Signer
from decentral.wire.messages import FrameRef, Record

SIGNERS = sorted((Signer(bytes([n] * 32)) for n in range(1, 9)), key=lambda signer: signer.peer)


PEERS = tuple(signer.peer for signer in SIGNERS)


SCHEMA = schema_of({"weight": torch.zeros(70, 64, requires_grad=True), "bias": torch.zeros(70, requires_grad=True)})


NUMEL = SCHEMA.fragments[0].numel


SPARSE = "topk(k=64, chunk=4096) >> signmag2"


def replica(rule: Aggregation, chain: str, method: type[SparseLoCo] | type[DESLoc] = SparseLoCo) -> Replica:
    codec = Codec(parse_compressor(chain))
    return Replica(SCHEMA, [torch.zeros(NUMEL)], method(), codec, codec, rule=rule)


def randn(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def round_of(
    codec: Codec, sent: Sequence[Tensor], states: Sequence[Tensor] = (), number: int = 0
) -> tuple[Record, dict[bytes, Frame]]:
    zero, frames, refs = bytes(32), {}, []
    for signer, change_N in zip(SIGNERS, sent, strict=False):
        header = Header(FrameKind.CONTRIBUTION, zero, 0, 1, 0, 0, 1, 0, zero, signer.peer, 30, 30, states=len(states))
        body = codec.encode(change_N, {}, SCHEMA.fragments[0].shapes, states).body
        frame = seal(header, body, signer)
        frames[frame.hash] = frame
        said = DESLoc(first_moment=1, second_moment=1).says(LiveSide(), 0, [change_N, *states])
        refs.append(FrameRef(signer.peer, frame.hash, 0, 30, 30, 0, said))
    peers = PEERS[: len(sent)]
    return Record(zero, 0, 1, number, 0, 0, zero, zero, peers, tuple(refs), (), (), peers, False), frames
