"""A mixture of experts in a real swarm: one peer is killed, one joins late, each trains its own experts alone."""

from __future__ import annotations

import struct
from pathlib import Path

import torch

from decentral.consensus.chain import contributions
from decentral.manifest.terms import Model
from decentral.tasks.batches import batch_at
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import LanguageModelConfig
from tests.kit.churn import FULL, churn, records_of

EXPERTS, INTERVAL = 6, 6
TERMS = {"hidden": 16, "layers": 1, "heads": 2, "context": 16, "experts": EXPERTS}
TEXT = torch.frombuffer(bytearray(b"sphinx of black quartz, judge my vow. " * 60), dtype=torch.uint8)


class Reader:
    """The shipped model on a peer's own windows of a text; it notes which experts each step moved."""

    def __init__(self, seed: int) -> None:
        self.model = build_language_model(LanguageModelConfig.of(Model(**TERMS)), seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.data, self.steps = bytes([seed]) * 32, 0
        self.moved: list[frozenset[int]] = []

    def step(self) -> float:
        before, self.steps = self.experts(), self.steps + 1
        batch = batch_at(TEXT, seed=0, peer=self.data, step=self.steps, batch_size=4, context=16)
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        apart = [(now != was).flatten(1).any(1) for now, was in zip(self.experts(), before, strict=True)]
        self.moved.append(frozenset(torch.stack(apart).any(0).nonzero().flatten().tolist()))
        return float(loss.detach())

    def experts(self) -> list[torch.Tensor]:
        return [p.detach().clone() for name, p in self.model.named_parameters() if ".experts." in name]


def test_experts_change_hands_when_one_peer_is_killed_and_another_comes(tmp_path: Path):
    late = Reader(3)
    swarm = churn("spes", tmp_path, late, Reader, model=TERMS, inner={"steps": INTERVAL})
    swarm.check(0, 1)
    records = records_of(tmp_path / "peer0")
    said = [[struct.unpack("<HH", ref.summary) for ref in contributions(record)] for record in records]
    assert [(place, FULL) for place in range(FULL)] in said[: len(said) // 2], "before the kill three shared them out"
    assert [(place, FULL) for place in range(FULL)] in said[len(said) // 2 :], "and so did those who came after"
    took = [[ref.peer for ref in contributions(record)] for record in records]
    peers = [one for one in took[:-1] if swarm.late_peer in one][-1]  # the last commit ends the run
    place, owners = peers.index(swarm.late_peer), len(peers)
    last = late.moved[-INTERVAL:-1]  # the last step of a round is merged into what the others learnt
    assert last == [frozenset(range(place, EXPERTS, owners))] * len(last)
    assert late.moved[0] == frozenset(range(EXPERTS)), "whoever has no place yet trains all"
