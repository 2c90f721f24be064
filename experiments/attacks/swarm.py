"""Rounds of SparseLoCo among honest and hostile peers in one process: real feedback, frames, records and rules.

Honest peers keep their error feedback, each its own. Every receiver computes the same bits, so one replica stands for
all. Hostile peers send through the same compressor, without feedback: what does not fit is not what they owe.
"""
# Shape suffixes: N = parameters, flat; K = honest peers, F = hostile ones, P = all.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from decentral.compressors import parse_compressor, parse_feedback
from decentral.compressors.base import compress_flat
from decentral.consensus.chain import Head
from decentral.optimizers import Aggregation, make_outer
from decentral.optimizers.aggregation.base import Sent
from decentral.parameters import schema_of
from decentral.replica.apply import outer_step
from decentral.replica.codec import Codec, Encoded
from decentral.replica.contribution import Contribution
from decentral.replica.replica import OuterStep, Replica
from decentral.wire.frames import Frame
from decentral.wire.keys import Signer
from decentral.wire.messages import FrameRef, Record
from experiments.attacks.hostile import Attack


@dataclass(frozen=True)
class Terms:
    """What all peers agree on."""

    rule: Aggregation
    compressor: str
    feedback: str
    outer_lr: float


class Swarm:
    """One run. ``hostile``: places of peers, by peer id."""

    def __init__(
        self, terms: Terms, shapes: dict[str, tuple[int, ...]], start_N: Tensor, num_peers: int, hostile: Sequence[int]
    ) -> None:
        self.signers = sorted((Signer(bytes([n] * 32)) for n in range(num_peers)), key=lambda signer: signer.peer)
        schema = schema_of({name: torch.zeros(shape, requires_grad=True) for name, shape in shapes.items()})
        compressor = parse_compressor(terms.compressor)
        self.codec, self.plain = Codec(compressor, parse_feedback(terms.feedback)), Codec(compressor)
        method = make_outer("sparseloco", {"lr": terms.outer_lr})
        self.replica = Replica(schema, [start_N], method, self.codec, Codec(parse_compressor("none")), rule=terms.rule)
        self.feedback: list[dict[str, Tensor]] = [{} for _ in range(num_peers)]
        self.hostile, self.rule = list(hostile), terms.rule
        self.honest = [n for n in range(num_peers) if n not in self.hostile]
        genesis = Head.genesis(bytes(32), bytes(32), self.replica.digest, self.signers[0].peer)
        self.head = replace(genesis, members=tuple(signer.peer for signer in self.signers))
        self.made: dict[int, Encoded] = {}  # of the last round, by peer

    @property
    def anchor_N(self) -> Tensor:
        """Where all are."""
        return self.replica.anchors[0]

    def meet(self, change_PN: Tensor, attack: Attack | None, generator: torch.Generator) -> OuterStep:
        """One round, of what all peers trained."""
        trained = self.honest if attack and attack.crafts else range(len(self.signers))
        shapes = self.replica.shapes(0)
        made = {n: self.codec.encode(change_PN[n], self.feedback[n], shapes) for n in trained}
        if attack and attack.crafts:
            made |= self._crafted(attack, torch.stack([self._decoded(made[n]) for n in self.honest]), generator)
        if attack:
            delivers = attack.delivers(len(self.hostile), generator)
            kept_back = {n for n, sends in zip(self.hostile, delivers, strict=True) if not sends}
            made = {n: one for n, one in made.items() if n not in kept_back}
        self.made = {n: made[n] for n in sorted(made)}
        return self._commit(self.made, change_PN)

    def sent(self) -> dict[int, Tensor]:
        """What receivers decoded in the last round, by peer."""
        return {n: self._decoded(one) for n, one in self.made.items()}

    def aggregated(self, row_PN: Tensor) -> Tensor:
        """What receivers make of these rows, the honest peers' first: what an attacker tries out.

        Its own rows go through the compressor. The round's draw (`bucketing`) is not known to it beforehand.
        """
        count = len(self.honest)
        forced_FN = self._through(row_PN[count:])
        peers = [*self.honest, *self.hostile]
        in_order = sorted(range(len(peers)), key=peers.__getitem__)
        sent_PN = torch.cat([row_PN[:count], forced_FN])[in_order]
        if self.rule.needs == "nothing":
            return sent_PN.mean(0)
        if self.rule.needs == "rows":
            return self.rule.combine(sent_PN)
        wide_PN = sent_PN.double()
        scales = self.rule.weigh(Sent.of_gram((wide_PN @ wide_PN.T).numpy(), [1.0] * len(peers), b"not known yet"))
        return (torch.tensor(scales, dtype=torch.float64) @ wide_PN / len(peers)).float()

    # ---- what is sent ----

    def _crafted(self, attack: Attack, honest_KN: Tensor, generator: torch.Generator) -> dict[int, Encoded]:
        crafted_FN = attack.changes(honest_KN, len(self.hostile), self.aggregated, generator)
        shapes = self.replica.shapes(0)
        return {n: self.plain.encode(row_N, {}, shapes) for n, row_N in zip(self.hostile, crafted_FN, strict=True)}

    def _through(self, row_FN: Tensor) -> Tensor:
        """What receivers decode of crafted vectors; equal ones are compressed once."""
        if len(row_FN) and bool((row_FN == row_FN[:1]).all()):
            return self._through_one(row_FN[0]).expand_as(row_FN)
        return torch.stack([self._through_one(row_N) for row_N in row_FN])

    def _through_one(self, row_N: Tensor) -> Tensor:
        return self.plain.decompress(compress_flat(self.plain.compressor, row_N, self.replica.shapes(0)))

    def _decoded(self, encoded: Encoded) -> Tensor:
        return self.codec.decompress(encoded.payloads)

    # ---- the round ----

    def _commit(self, made: dict[int, Encoded], change_PN: Tensor) -> OuterStep:
        frames: dict[bytes, Frame] = {}
        refs = []
        for n, encoded in made.items():
            contribution = Contribution(0, self.head.hash, change_PN[n], change_PN[n], 1, 1, encoded=encoded)
            frame = contribution.frame(self.head, self.signers[n])
            frames[frame.hash] = frame
            refs.append(FrameRef(frame.header.sender, frame.hash, 0, 1, 1, contribution.base_step(self.head), b""))
        record = self._record(tuple(refs))
        step = outer_step(self.replica, record, frames)
        self.replica.install(step)
        for n in made:
            self.feedback[n] = made[n].feedback
        self.head = replace(self.head.extended(record), anchor=self.replica.digest)
        return step

    def _record(self, refs: tuple[FrameRef, ...]) -> Record:
        head = self.head
        assert head.anchor is not None
        return Record(
            head.run, head.epoch, head.round + 1, head.outer_step, 0, 0, head.hash, head.anchor, head.members, refs, (),
            (), head.members, False,
        )  # fmt: skip
