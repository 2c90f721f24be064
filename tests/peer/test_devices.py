"""A peer whose model is on a GPU beside one on the processor: one anchor, and only what is sent is made elsewhere.

Wherever there is a GPU; without one both peers are on the processor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from decentral.manifest import Manifest
from decentral.peer import Peer
from tests.devices import DEVICES
from tests.kit.problems import Problem, Swarm, adam, joined, run_terms
from tests.kit.tables import long_but, rows_but

RUNS: dict[str, dict[str, Any]] = {
    "sparseloco": {},
    "sparseloco with overlap": {"outer": {"overlap": 2}},
    "diloco": {},
    "diloco in 8 bits": {"compressor": {"chain": "int8(block=256)"}},
    "streaming": {},
    "noloco": {},
    "eager": {},
}
# make test has one of processors, on which other tests have peers of all kinds, and of a GPU all.
CASES = [(name, device) for device in DEVICES for name in RUNS]
CASES = rows_but([("sparseloco with overlap", "cpu"), *(case for case in CASES if case[1] != "cpu")], CASES)
EACH_DEVICE = pytest.mark.parametrize("device", long_but([device for device in DEVICES if device != "cpu"], DEVICES))


def on(device: str, seed: int, dtype: torch.dtype = torch.float32) -> Problem:
    """What peers draw is the same on all devices."""
    problem = adam(seed)
    problem.model.to(device, dtype)
    problem.optimizer = torch.optim.AdamW(problem.model.parameters(), lr=0.01)
    return problem


class Two(Swarm):
    """A founder on ``device``, and a peer on the processor."""

    def __init__(self, manifest: Manifest, folder: Path, device: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(manifest, folder, on(device, 0, dtype), on("cpu", 1, dtype))
        self.places = set[str]()  # where what the founder owes lies

    def trains(self, number: int, peer: Peer) -> None:
        losses = self.losses.setdefault(number, [])
        while not peer.done:
            losses.append(self.problems[number].step())
            if not number:
                owed = peer.swarm.node.replica.own_tensors().values()
                self.places |= {one_N.device.type for one_N in owed}


def terms(name: str, rounds: int = 6) -> Manifest:
    tables = {"swarm": {"min_peers": 2, "deadline_floor": 5.0}, **RUNS[name]}
    return run_terms(name.split()[0], run={"rounds": rounds}, **tables)


@pytest.mark.parametrize(("name", "device"), CASES)
def test_a_peer_on_a_device_and_one_on_the_processor_hold_the_same_bits(tmp_path, name, device):
    two = Two(terms(name), tmp_path, device).ends_alike()
    for mine_N, theirs_N in zip(two.anchors[0], two.anchors[1], strict=True):
        assert mine_N.device.type == "cpu"
        assert torch.equal(mine_N, theirs_N)
    assert all(losses[-1] < losses[0] for losses in two.losses.values())
    assert two.places == ({device} if name.startswith("sparseloco") else two.places), "what it owes stays there"


@EACH_DEVICE
def test_a_model_in_half_precision_is_rounded_on_its_device_and_nobody_elses_anchor_is(tmp_path, device):
    Two(terms("sparseloco"), tmp_path, device, torch.bfloat16).ends_alike()


@EACH_DEVICE
def test_a_peer_goes_on_from_its_checkpoint_on_its_device_and_on_the_other(tmp_path, device):
    manifest = run_terms("sparseloco", run={"rounds": 1000})
    problem = on(device, 0)
    with joined(manifest, problem, tmp_path, checkpoint_every=3) as peer:
        while peer.round < 4:
            problem.step()
        digest, live_N = peer.anchor_digest, problem.flat().cpu()
        owed = {name: one_N.cpu() for name, one_N in peer.swarm.node.replica.own_tensors().items()}
    for place in dict.fromkeys((device, "cpu")):
        again = on(place, 0)
        with joined(manifest, again, tmp_path) as peer:
            assert (peer.anchor_digest, peer.round) == (digest, 4)
            torch.testing.assert_close(again.flat().cpu(), live_N, rtol=0, atol=0)
            found = peer.swarm.node.replica.own_tensors()
            assert all(torch.equal(found[name].cpu(), one_N) for name, one_N in owed.items())
            moments = [one for state in again.optimizer.state.values() for one in state.values() if one.dim()]
            assert {one.device.type for one in moments} == {place}
            if place != device:
                while peer.round < 6:
                    again.step()
