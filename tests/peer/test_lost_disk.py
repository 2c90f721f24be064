"""A peer whose disk is lost, all but its key: what other peers keep for it comes back, to the bit, or nothing does."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from decentral.manifest import Manifest, parse_manifest, preset_manifest
from decentral.peer import Peer
from decentral.redundancy.keeper import KEEP, KEPT, Keeper
from decentral.state.checkpoint import Checkpoint, flatten, load_newest
from tests.kit.patience import PATIENCE, until
from tests.kit.problems import Problem, Swarm, adam, contributed, run_terms, run_together, told

pytestmark = pytest.mark.timeout(3 * PATIENCE)  # gossip of four peers takes 27 s on an idle machine
KEPT_BY_OTHERS = {"keepers": 3, "needed": 2, "seconds": 0.2, "megabytes": 10}
PLENTY = 2 * PATIENCE  # s for all that the loser does


class WithKeepers(Swarm):
    """Three peers that stay, and one whose folder is lost."""

    def __init__(self, folder: Path, preset: str = "sparseloco", **redundancy: Any) -> None:
        swarm = {"redundancy": {**KEPT_BY_OTHERS, **redundancy}}
        manifest = run_terms(preset, run={"rounds": 10**6}, inner={"steps": 2}, swarm=swarm)
        super().__init__(manifest, folder, *map(adam, range(3)), adam(9), checkpoint_every=1)
        self.out, self.over = folder / "peer3", threading.Event()
        self.checkpoints: dict[tuple[int, int], Checkpoint] = {}  # of the loser, by outer and inner steps behind them

    def stays(self, number: int) -> None:
        with self.enters(number):
            until(self.over.is_set, self.problems[number].step, PLENTY)

    def observe(self, event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":  # told on the thread that wrote it, so it is the newest
            found = load_newest(self.out / "checkpoints")
            assert found is not None
            round_ = found.meta["gossip_step"] or found.meta["head"]["outer_step"]
            self.checkpoints[round_, found.meta["inner_steps"]] = found
        self.events[3].append(event)

    @contextmanager
    def loser(self, problem: Problem, *, require_peers: int = 0) -> Iterator[Peer]:
        self.problems[3] = problem
        given = {"require_peers": require_peers, "join_timeout": PATIENCE, "observer": self.observe}
        with self.enters(3, **given) as peer:
            yield peer

    def loses_its_disk(self) -> None:
        """After others have what it gave."""
        problem = adam(9)
        with self.loser(problem, require_peers=4):
            until(lambda: len(told(self.events[3], "state_given")) >= 2, problem.step)
        self.wipe()

    def wipe(self) -> None:
        """All but the key, which is backed up."""
        for path in self.out.iterdir():
            if path.name != "identity.key":
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def runs(self, loser: Callable[[], None]) -> None:
        def ends() -> None:
            try:
                loser()
            finally:
                self.over.set()

        run_together(*(lambda n=n: self.stays(n) for n in range(3)), ends, timeout=PLENTY)


def held_by(problem: Problem) -> dict[str, torch.Tensor]:
    """What its inner optimizer holds."""
    return flatten(problem.optimizer.state_dict(), "m")[0]


@pytest.mark.parametrize("preset", ["sparseloco", pytest.param("noloco", marks=pytest.mark.long)])
def test_a_peer_whose_disk_is_lost_has_its_inner_optimizer_back_to_the_bit(tmp_path: Path, preset: str) -> None:
    swarm = WithKeepers(tmp_path, preset)

    def loser() -> None:
        swarm.loses_its_disk()
        again = adam(9)
        with swarm.loser(again) as peer:
            (back,) = told(swarm.events[3], "state_restored")
            assert len(back["peers"]) == 2
            assert peer.inner_steps > 0
            kept = swarm.checkpoints[back["round"], peer.inner_steps]
            stored = [tensor for name, tensor in kept.tensors.items() if name.startswith("training/")]
            found = held_by(again)
            assert len(found) == 9, "two moments and a count of each of three parameters"
            assert all(any(torch.equal(one, tensor) for tensor in stored) for one in found.values())
            before = contributed(swarm.events[3])
            until(lambda: contributed(swarm.events[3]) > before + 1, again.step)

    swarm.runs(loser)


@pytest.mark.long
def test_what_does_not_come_back_whole_is_said_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a state of another inner optimizer, nor pieces of keepers that lie."""
    swarm = WithKeepers(tmp_path)
    honest, lying = Keeper._on_kept, threading.Event()

    async def lies(keeper: Keeper, peer: bytes, data: bytes) -> bytes:
        found = await honest(keeper, peer, data)
        return bytes(len(found)) if data and lying.is_set() else found

    monkeypatch.setattr(Keeper, "_on_kept", lies)

    def begins_anew(problem: Problem, why: str) -> None:
        rates = [group["lr"] for group in problem.optimizer.param_groups]
        with swarm.loser(problem) as peer:
            assert why in told(swarm.events[3], "state_not_restored")[-1]["why"]
            assert peer.inner_steps == 0
            assert held_by(problem) == {}
            assert [group["lr"] for group in problem.optimizer.param_groups] == rates
        assert told(swarm.events[3], "state_restored") == []

    def loser() -> None:
        swarm.loses_its_disk()
        other = adam(9)
        first, *rest = other.model.parameters()
        other.optimizer = torch.optim.AdamW([{"params": [first]}, {"params": rest, "lr": 0.5}], lr=0.125)
        begins_anew(other, "another inner optimizer")
        swarm.wipe()
        lying.set()
        begins_anew(adam(9), "of the 2 pieces that are needed are here")

    swarm.runs(loser)


def test_without_the_key_in_the_terms_nothing_is_served_sent_or_said(tmp_path: Path) -> None:
    class Looked(Swarm):
        def trains(self, number: int, peer: Peer) -> None:
            super().trains(number, peer)
            kinds = peer.swarm.node.transport.traffic.kinds
            assert peer._up.redundancy is None
            assert "/decentral/frame/1" in kinds or "/decentral/piece/1" in kinds
            assert not {KEEP, KEPT} & set(kinds)

    manifest = run_terms("sparseloco", run={"rounds": 3}, inner={"steps": 2})
    swarm = Looked(manifest, tmp_path, adam(0), adam(1), checkpoint_every=1).ends_alike()
    assert not [event for events in swarm.events.values() for event in events if event["event"].startswith("state_")]


def test_terms_without_the_key_have_the_digest_that_they_had() -> None:
    terms = preset_manifest("sparseloco", run={"salt": "test"})
    assert terms.swarm.redundancy is None
    assert terms.digest.hex() == BEFORE
    assert parse_manifest(terms.to_toml()).digest == terms.digest
    asked = terms.changed(swarm={"redundancy": {"keepers": 5}})
    assert asked.digest != terms.digest
    assert isinstance(again := parse_manifest(asked.to_toml()), Manifest)
    assert again.digest == asked.digest
    assert again.swarm.redundancy is not None
    assert (again.swarm.redundancy.keepers, again.swarm.redundancy.needed) == (5, 2)


BEFORE = "1fba42f15eba7193ec8d8f1a38dc5a9919efeb0edf68cfd60f03d901caf15fec"  # by a version that did not know the key
