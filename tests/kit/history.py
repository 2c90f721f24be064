"""The commits of a run, made beforehand: real frames, records and votes of two peers, and where each one leads.

A life on disk can then be cut at any moment and compared with what is known to be true.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decentral.compressors import parse_compressor
from decentral.consensus.chain import Head
from decentral.optimizers.diloco import DiLoCo
from decentral.parameters import schema_of
from decentral.replica.apply import outer_step
from decentral.replica.codec import Codec
from decentral.replica.contribution import encode_whole, header_after
from decentral.replica.replica import Replica
from decentral.wire.frames import FrameKind, seal
from decentral.wire.keys import Signer
from decentral.wire.messages import Certificate, Commit, FrameRef, Record, vote_text
from tests.kit.liars import record_after

RUN = bytes(range(32))
SIGNERS = sorted(
    (Signer(hashlib.blake2b(b"life" + bytes([n]), digest_size=32).digest()) for n in range(2)), key=lambda s: s.peer
)
ME = SIGNERS[0].peer


@dataclass(frozen=True)
class History:
    """``heads[r]`` is where a peer stands after round r, with the anchor's digest; round 0 is the genesis."""

    width: int
    heads: list[Head]
    commits: list[Commit]  # commits[r - 1] is of round r
    frames: list[list[bytes]]

    def replica(self) -> Replica:
        """A peer's replica at the genesis."""
        codec = Codec(parse_compressor("none"))
        schema = schema_of(torch.nn.Linear(self.width, 4, bias=False), 1)
        return Replica(schema, [torch.zeros(4 * self.width)], DiLoCo(lr=0.7, momentum=0.9), codec, codec)


def make_history(rounds: int, width: int = 4) -> History:
    """A run of two peers over ``4 * width`` parameters."""
    history = History(width, [], [], [])
    replica = history.replica()
    members = tuple(signer.peer for signer in SIGNERS)
    genesis = Head.genesis(RUN, replica.schema.digest, replica.digest, members[0])
    history.heads.append(replace(genesis, members=members))
    for number in range(1, rounds + 1):
        head = history.heads[-1]
        gradients = [_gradient(4 * width, number, who) for who in range(len(SIGNERS))]
        headers = [header_after(head, FrameKind.CONTRIBUTION, 0, s.peer, steps=1, tokens=1) for s in SIGNERS]
        bodies = [encode_whole(replica, 0, gradient).body for gradient in gradients]
        frames = [seal(h, body, s) for h, body, s in zip(headers, bodies, SIGNERS, strict=True)]
        refs = tuple(FrameRef(frame.header.sender, frame.hash, 0, 1, 1) for frame in frames)
        record = record_after(head, frames=refs)
        replica.install(outer_step(replica, record, {frame.hash: frame for frame in frames}))
        history.heads.append(replace(head.extended(record), anchor=replica.digest))
        history.commits.append(Commit(record, _certificate(record)))
        history.frames.append([frame.data for frame in frames])
    return history


def _gradient(numel: int, number: int, who: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * number + who))


def _certificate(record: Record) -> Certificate:
    text = vote_text(record.run, record.epoch, record.round, 0, record.hash)
    return Certificate(0, tuple((signer.peer, signer.sign(text)) for signer in SIGNERS))
