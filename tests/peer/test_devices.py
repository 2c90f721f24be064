"""A peer whose model is on a GPU beside one on the processor: one anchor, and only what is sent is made elsewhere.

Wherever there is a GPU; without one both peers are on the processor.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from decentral.manifest import Manifest
from decentral.peer import Peer, join
from tests.devices import DEVICES
from tests.kit.problems import LOOPBACK, Problem, run_terms, run_together

INT8 = {"compressor": {"chain": "int8(block=256)"}}
RUNS: dict[str, dict[str, Any]] = {
    "sparseloco": {},
    "sparseloco with overlap": {"outer": {"overlap": 2}},
    "diloco": {},
    "diloco in 8 bits": INT8,
    "streaming": {},
    "noloco": {},
    "eager": {},
}
FIRST = (
    "sparseloco with overlap",
    "diloco in 8 bits",
)  # of two peers on processors make test has these, and of a GPU all
CASES = [
    pytest.param(name, device, marks=[] if device != "cpu" or name in FIRST else pytest.mark.long)
    for device in DEVICES
    for name in RUNS
]


class ProblemOn(Problem):
    """Least squares on a device; what peers draw is the same on all of them."""

    def __init__(self, seed: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(seed)
        self.device, self.dtype = device, dtype
        self.model.to(device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self) -> float:
        inputs = torch.randn(32, 64, generator=self.data)
        wanted = (inputs @ self.goal.T).to(self.device, self.dtype)
        loss = (self.model(inputs.to(self.device, self.dtype)) - wanted).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


@dataclass
class Two:
    """A founder on ``device``, and a peer on the processor."""

    manifest: Manifest
    folder: Path
    device: str
    dtype: torch.dtype = torch.float32
    invited: threading.Event = field(default_factory=threading.Event)
    invite: str = ""
    anchors: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    losses: dict[int, list[float]] = field(default_factory=dict)
    places: set[str] = field(default_factory=set)  # where what the founder owes lies

    def run(self) -> Two:
        run_together(lambda: self.peer(0, self.device), lambda: self.peer(1, "cpu"))
        return self

    def peer(self, number: int, device: str) -> None:
        assert not number or self.invited.wait(60)
        problem = ProblemOn(number, device, self.dtype)
        with entered(self.invite or self.manifest, problem, self.folder / f"peer{number}") as peer:
            if not number:
                self.invite = peer.invite
                self.invited.set()
            peer.wait_for_company()
            losses = self.losses.setdefault(number, [])
            while not peer.done:
                losses.append(problem.step())
                if not number:
                    owed = peer.swarm.node.replica.own_tensors().values()
                    self.places |= {one_N.device.type for one_N in owed}
            self.anchors[number], self.digests[number] = peer.anchor(), peer.anchor_digest


def entered(run: Manifest | str, problem: Problem, out: Path, **more: Any) -> Peer:
    settings: dict[str, Any] = {"listen": LOOPBACK, "transport": "native", "lan": False, "quiet": True}
    return join(run, problem.model, problem.optimizer, out=out, **settings, **more, alone=True)


def terms(name: str, rounds: int = 6) -> Manifest:
    tables = {"swarm": {"min_peers": 2, "deadline_floor": 5.0}, **RUNS[name]}
    return run_terms(name.split()[0], run={"rounds": rounds}, **tables)


@pytest.mark.parametrize(("name", "device"), CASES)
def test_a_peer_on_a_device_and_one_on_the_processor_hold_the_same_bits(tmp_path, name, device):
    two = Two(terms(name), tmp_path, device).run()
    assert two.digests[0] == two.digests[1]
    for mine_N, theirs_N in zip(two.anchors[0], two.anchors[1], strict=True):
        assert mine_N.device.type == "cpu"
        assert torch.equal(mine_N, theirs_N)
    assert all(losses[-1] < losses[0] for losses in two.losses.values())


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_peer_owes_stays_on_its_device(tmp_path, device):
    assert Two(terms("sparseloco"), tmp_path, device).run().places == {device}


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_in_half_precision_is_rounded_on_its_device_and_nobody_elses_anchor_is(tmp_path, device):
    two = Two(terms("sparseloco"), tmp_path, device, torch.bfloat16).run()
    assert two.digests[0] == two.digests[1]


@pytest.mark.parametrize("device", DEVICES)
def test_a_peer_goes_on_from_its_checkpoint_on_its_device_and_on_the_other(tmp_path, device):
    manifest = run_terms("sparseloco", run={"rounds": 1000})
    problem = ProblemOn(0, device)
    with entered(manifest, problem, tmp_path, checkpoint_every=3) as peer:
        while peer.round < 4:
            problem.step()
        digest, live_N = peer.anchor_digest, problem.flat().cpu()
        owed = {name: one_N.cpu() for name, one_N in peer.swarm.node.replica.own_tensors().items()}
    for place in dict.fromkeys((device, "cpu")):
        again = ProblemOn(0, place)
        with entered(manifest, again, tmp_path) as peer:
            assert (peer.anchor_digest, peer.round) == (digest, 4)
            torch.testing.assert_close(again.flat().cpu(), live_N, rtol=0, atol=0)
            found = peer.swarm.node.replica.own_tensors()
            assert all(torch.equal(found[name].cpu(), one_N) for name, one_N in owed.items())
            moments = [one for state in again.optimizer.state.values() for one in state.values() if one.dim()]
            assert {one.device.type for one in moments} == {place}
            if place == device:
                continue
            while peer.round < 6:
                again.step()
