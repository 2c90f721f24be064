"""How a peer begins again while its swarm goes on."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decentral.errors import ConfigError, UsageError
from decentral.manifest import preset_manifest
from decentral.node.folder import keep_addresses, read_addresses
from decentral.peer import Peer, join
from decentral.peer.joining import founding_terms
from decentral.peer.settings import OPTIONS
from decentral.rounds.local_state import CommittedUpdate
from decentral.tensors import memory
from decentral.training.live_model import LiveModel
from decentral.training.swarm_side import SwarmThread
from tests.kit.patience import PATIENCE, until
from tests.kit.problems import Problem, Swarm, alone, run_terms, run_together, train


def test_what_an_earlier_life_sent_is_no_progress_when_its_commit_comes_while_the_next_one_starts(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The live model was put past it with all of that progress, which so moved the anchor a second time."""
    manifest = run_terms("diloco", run={"rounds": 1000}, inner={"steps": 100})
    problem, again = Problem(0), Problem(0)
    with alone(tmp_path, manifest, problem):
        for _ in range(3):
            problem.step()
    start = SwarmThread.start

    def start_as_a_commit_comes(swarm: SwarmThread) -> None:
        start(swarm)
        swarm.call(commit_what_was_sent, swarm)

    monkeypatch.setattr(SwarmThread, "start", start_as_a_commit_comes)
    with alone(tmp_path, manifest, again) as peer:
        live_N = LiveModel(again.model, 1, None).read(0)
        torch.testing.assert_close(live_N, peer.anchor()[0])


async def commit_what_was_sent(swarm: SwarmThread) -> None:
    replica, head = swarm.node.replica, swarm.node.driver.head
    before_N = replica.anchors[0]
    after_N = replica.anchors[0] = before_N + 1.0
    all_of_it = torch.ones_like(before_N, dtype=torch.bool)
    swarm.updates.put(CommittedUpdate(None, head.hash, 0, before_N, after_N, None, taken_N=all_of_it))


def test_the_options_are_shown_in_joins_signature_with_their_defaults() -> None:
    parameters = inspect.signature(join).parameters.values()
    keywords = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert keywords == {name: option.default for name, option in OPTIONS.items()}


def test_a_run_is_founded_without_a_file_by_terms_that_suit_its_length_and_the_loop() -> None:
    problem = Problem(0)
    optimizer = torch.optim.AdamW(problem.model.parameters(), lr=0.02, weight_decay=0.3)
    terms = founding_terms("diloco", 20, 5, problem.model, optimizer)
    assert (terms.run.rounds, terms.inner.steps, terms.model.task) == (20, 5, "custom")
    assert (terms.inner.optimizer_name, terms.inner.learning_rate, terms.inner.weight_decay) == ("adamw", 0.02, 0.3)
    assert (terms.exchange.kind, terms.outer.hyper) == ("gather", {"lr": 0.8, "momentum": 0.7})
    assert isinstance(join(model=problem.model, optimizer=optimizer, preset="diloco", alone=True), Peer)
    with pytest.raises(UsageError, match="did you mean diloco"):
        join(model=problem.model, optimizer=optimizer, preset="diloko", alone=True)
    with pytest.raises(ConfigError, match="the model is missing; pass the torch module"):
        join(preset="diloco", alone=True)
    with pytest.raises(ConfigError, match="give terms or a preset, not both"):
        join("run.toml", problem.model, optimizer, preset="diloco")


def test_a_model_that_is_larger_than_its_terms_are_for_is_told_when_its_run_is_founded(
    tmp_path: Path, caplog: Any
) -> None:
    model = torch.nn.Linear(2000, 2000)
    dense = preset_manifest("diloco", model={"task": "custom"}, exchange={"kind": "gather"})
    loop = SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    with alone(tmp_path / "a", dense, loop):
        (said,) = [line for line in caplog.messages if "parameters" in line]
    assert said.startswith("your model has 4,002,000 parameters, and a round sends all of them to each of the others: ")
    assert "decentral init --task custom --model-size 4M writes terms for it" in said
    caplog.clear()
    with alone(tmp_path / "b", dense.changed(exchange={"kind": "reduce"}), loop):
        assert not [line for line in caplog.messages if "parameters" in line]


def elsewhere(out: Path) -> None:
    """Forget at which port a peer listened, for it would come back there."""
    if (known := read_addresses(out)).listen:
        keep_addresses(out, replace(known, listen=()))


def test_a_first_peer_that_comes_back_at_another_address_finds_its_run(tmp_path: Path) -> None:
    """It has no invite, and the others dial only where it was."""
    terms = run_terms("sparseloco", run={"rounds": 10**6}, inner={"steps": 2})
    swarm, seen, over = Swarm(terms, tmp_path, Problem(0), Problem(1)), list[tuple[str, ...]](), threading.Event()

    def first() -> None:
        step = swarm.problems[0].step
        try:
            for _ in range(2):
                elsewhere(tmp_path / "peer0")
                with swarm.enters(0) as peer:
                    until(lambda at=peer.round, peer=peer: in_company(peer, at + 3), step)
                    seen.append(tuple(peer.status().addresses))
        finally:
            over.set()

    def second() -> None:
        with swarm.enters(1):
            until(over.is_set, swarm.problems[1].step)

    run_together(first, second, timeout=2 * PATIENCE)
    assert set(seen[0]).isdisjoint(seen[1])


def in_company(peer: Peer, round_number: int) -> bool:
    return peer.round >= round_number and len(peer.status().members) == 2


def test_another_thread_may_ask_a_peer_anything_while_it_begins(tmp_path: Path, monkeypatch: Any) -> None:
    """The thread that shows its status does, and a script that hands out the invite."""
    problem, start = Problem(0), SwarmThread.start
    peer, found = alone(tmp_path, run_terms("sparseloco"), problem), list[object]()

    def start_while_somebody_asks(swarm: SwarmThread) -> None:
        found.extend([peer.invite, peer.round, peer.anchor_digest, peer.status().state, len(peer.anchor())])
        peer.pause()
        start(swarm)

    monkeypatch.setattr(SwarmThread, "start", start_while_somebody_asks)
    with peer:
        assert found == ["", 0, "", "starting", 1]
        until(lambda: peer.swarm.node.resting.reasons, problem.step)
        peer.resume()
        train(peer, problem, rounds=2)


def test_a_peer_whose_vectors_lie_in_files_makes_the_same_anchors(tmp_path: Path, monkeypatch: Any) -> None:
    """Of a real model only long vectors do; here all."""
    terms = run_terms("sparseloco", run={"rounds": 3})

    def trained(folder: Path, **given: Any) -> list[torch.Tensor]:
        problem = Problem(0)
        with alone(folder, terms, problem, **given) as peer:
            train(peer, problem)
            return peer.anchor()

    wanted = trained(tmp_path / "a")
    monkeypatch.setattr(memory, "_WORTH_IT", 1)
    monkeypatch.setattr(memory, "_folder", None)
    (tmp_path / "files").mkdir()
    made = trained(tmp_path / "b", offload=tmp_path / "files")
    assert memory._folder == tmp_path / "files"
    assert all(torch.equal(one, other) for one, other in zip(made, wanted, strict=True))


def anchors_left(out: Path, rounds: int) -> list[object]:
    """Of those that a peer began with, what is still there when it has made so many rounds."""
    problem = Problem(0)
    with alone(out, run_terms("sparseloco", run={"rounds": 100}), problem) as peer:
        begun = [weakref.ref(anchor_N) for anchor_N in peer.swarm.node.replica.anchors]
        train(peer, problem, rounds)
        gc.collect()
        return [anchor() for anchor in begun if anchor() is not None]


@pytest.mark.long
def test_after_a_few_rounds_nothing_is_left_of_the_anchor_that_a_peer_began_with_or_resumed_from(
    tmp_path: Path,
) -> None:
    """For a model of a billion parameters each vector is 4 GB."""
    assert anchors_left(tmp_path, rounds=3) == []
    assert anchors_left(tmp_path, rounds=6) == []
