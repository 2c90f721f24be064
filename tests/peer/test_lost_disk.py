"""A peer whose disk is lost, all but its key: what other peers keep for it comes back, to the bit, or nothing does."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from decentral.manifest import Manifest, parse_manifest, preset_manifest
from decentral.peer import Peer, join
from decentral.redundancy.keeper import KEEP, KEPT, Keeper
from decentral.state.checkpoint import Checkpoint, flatten, load_newest
from tests.kit.absent import contributed, told, until
from tests.kit.problems import LOOPBACK, Problem, run_terms, run_together

LONG = 60.0  # s
pytestmark = pytest.mark.timeout(5 * LONG)  # gossip of four peers takes 27 s on an idle machine
KEPT_BY_OTHERS = {"keepers": 3, "needed": 2, "seconds": 0.2, "megabytes": 10}
HOW: dict[str, Any] = {"listen": LOOPBACK, "transport": "native", "lan": False, "quiet": True, "checkpoint_every": 1}


class Swarm:
    """Three peers that stay, and one whose folder is lost."""

    def __init__(self, folder: Path, preset: str = "sparseloco", **redundancy: Any) -> None:
        swarm = {"redundancy": {**KEPT_BY_OTHERS, **redundancy}}
        self.manifest = run_terms(preset, run={"rounds": 10**6}, inner={"steps": 2}, swarm=swarm)
        self.folder, self.out = folder, folder / "loser"
        self.invite, self.invited, self.over = "", threading.Event(), threading.Event()
        self.events: list[dict[str, Any]] = []
        self.checkpoints: dict[tuple[int, int], Checkpoint] = {}  # of the loser, by outer and inner steps behind them

    def stays(self, number: int) -> None:
        problem = adam(number)
        assert number == 0 or self.invited.wait(LONG)
        run = self.invite if number else self.manifest
        with join(run, problem.model, problem.optimizer, out=self.folder / f"{number}", **HOW, alone=True) as peer:
            if number == 0:
                self.invite = peer.invite
                self.invited.set()
            until(self.over.is_set, problem, seconds=4 * LONG)  # all that the loser does, each within LONG

    def observe(self, event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":  # told on the thread that wrote it, so it is the newest
            found = load_newest(self.out / "checkpoints")
            assert found is not None
            round_ = found.meta["gossip_step"] or found.meta["head"]["outer_step"]
            self.checkpoints[round_, found.meta["inner_steps"]] = found
        self.events.append(event)

    @contextmanager
    def loser(self, problem: Problem, *, require_peers: int = 4) -> Iterator[Peer]:
        how = {**HOW, "require_peers": require_peers, "join_timeout": LONG, "observer": self.observe}
        with join(self.invite, problem.model, problem.optimizer, out=self.out, **how, alone=True) as peer:
            yield peer

    def loses_its_disk(self) -> None:
        """After others have what it gave."""
        assert self.invited.wait(LONG)
        problem = adam(9)
        with self.loser(problem):
            until(lambda: len(told(self.events, "state_given")) >= 2, problem)
        self.wipe()

    def wipe(self) -> None:
        """All but the key, which is backed up."""
        for path in self.out.iterdir():
            if path.name != "identity.key":
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def run(self, loser: Any) -> None:
        def ends() -> None:
            try:
                loser()
            finally:
                self.over.set()

        run_together(*(lambda n=n: self.stays(n) for n in range(3)), ends, timeout=4 * LONG)


def adam(seed: int) -> Problem:
    problem = Problem(seed)
    problem.optimizer = torch.optim.AdamW(problem.model.parameters(), lr=0.01)
    return problem


def moments(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return flatten(optimizer.state_dict(), "m")[0]


@pytest.mark.parametrize("preset", ["sparseloco", pytest.param("noloco", marks=pytest.mark.long)])
def test_a_peer_whose_disk_is_lost_has_its_inner_optimizer_back_to_the_bit(tmp_path: Path, preset: str) -> None:
    swarm = Swarm(tmp_path, preset)

    def loser() -> None:
        swarm.loses_its_disk()
        again = adam(9)
        with swarm.loser(again, require_peers=0) as peer:
            (back,) = told(swarm.events, "state_restored")
            assert len(back["peers"]) == 2
            assert peer.inner_steps > 0
            kept = swarm.checkpoints[back["round"], peer.inner_steps]
            stored = [tensor for name, tensor in kept.tensors.items() if name.startswith("training/")]
            found = moments(again.optimizer)
            assert len(found) == 9, "two moments and a count of each of three parameters"
            assert all(any(torch.equal(one, tensor) for tensor in stored) for one in found.values())
            before = contributed(swarm.events)
            until(lambda: contributed(swarm.events) > before + 1, again)

    swarm.run(loser)


def test_what_does_not_come_back_whole_is_said_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a state of another inner optimizer, nor pieces of keepers that lie."""
    swarm = Swarm(tmp_path)
    honest, lying = Keeper._on_kept, threading.Event()

    async def lies(keeper: Keeper, peer: bytes, data: bytes) -> bytes:
        found = await honest(keeper, peer, data)
        return bytes(len(found)) if data and lying.is_set() else found

    monkeypatch.setattr(Keeper, "_on_kept", lies)

    def begins_anew(problem: Problem, why: str) -> None:
        rates = [group["lr"] for group in problem.optimizer.param_groups]
        with swarm.loser(problem, require_peers=0) as peer:
            assert why in told(swarm.events, "state_not_restored")[-1]["why"]
            assert peer.inner_steps == 0
            assert moments(problem.optimizer) == {}
            assert [group["lr"] for group in problem.optimizer.param_groups] == rates
        assert told(swarm.events, "state_restored") == []

    def loser() -> None:
        swarm.loses_its_disk()
        other = adam(9)
        first, *rest = other.model.parameters()
        other.optimizer = torch.optim.AdamW([{"params": [first]}, {"params": rest, "lr": 0.5}], lr=0.125)
        begins_anew(other, "another inner optimizer")
        swarm.wipe()
        lying.set()
        begins_anew(adam(9), "of the 2 pieces that are needed are here")

    swarm.run(loser)


def test_without_the_key_in_the_terms_nothing_is_served_sent_or_said(tmp_path: Path) -> None:
    manifest, events = run_terms("sparseloco", run={"rounds": 3}, inner={"steps": 2}), list[dict[str, Any]]()
    invited, invite = threading.Event(), list[str]()

    def peer(number: int) -> None:
        problem = adam(number)
        assert number == 0 or invited.wait(LONG)
        run = invite[0] if number else manifest
        with join(
            run, problem.model, problem.optimizer, out=tmp_path / f"{number}", observer=events.append, **HOW, alone=True
        ) as one:
            if number == 0:
                invite.append(one.invite)
                invited.set()
            one.wait_for_company()
            until(lambda: one.done, problem)
            kinds = one.swarm.node.transport.traffic.kinds
            assert one._up.redundancy is None
            assert "/decentral/frame/1" in kinds or "/decentral/piece/1" in kinds
            assert not {KEEP, KEPT} & set(kinds)

    run_together(lambda: peer(0), lambda: peer(1))
    assert not [event for event in events if event["event"].startswith("state_")]


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
