"""How a run ends for those who come late, and what a peer says when it goes, or is left, before the end."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from decentral.errors import DiskError, ManifestMismatch, NoPeersError
from decentral.manifest import Manifest, preset_manifest
from decentral.observe.requests import ask
from decentral.observe.status import read_status
from decentral.peer import Peer, join
from decentral.peer.participation import Participation
from decentral.peer.saved import WriteBehind
from decentral.state.checkpoint import load_newest
from decentral.state.export import export
from tests.kit.disks import SlowDisk
from tests.kit.patience import PATIENCE, until
from tests.kit.problems import NET, Problem, Swarm, adam, alone, joined, run_terms, train
from tests.kit.tables import long_but

OVER = "This run is over: decentral export {} --to model/"
WAS_OVER = f"{OVER}; a new run takes another folder, --out or join(out=...)"
NOWHERE: dict[str, Any] = {"listen": ("/ip4/192.0.2.1/tcp/1",)}  # not of this machine: to listen would fail


def anchors_kept(out: Path) -> list[torch.Tensor]:
    checkpoint = load_newest(out / "checkpoints")
    assert checkpoint is not None
    return [tensor for name, tensor in sorted(checkpoint.tensors.items()) if name.startswith("anchor/")]


class First(Swarm):
    """The run's first peer, on a thread of its own, which keeps serving after the end."""

    def __init__(self, manifest: Manifest, folder: Path, company: int) -> None:
        super().__init__(manifest, folder, Problem(0), keep_serving=True)
        self.company, self.met, self.over = company, threading.Event(), threading.Event()

    def live(self) -> None:
        with self.enters(0) as self.one:
            until(lambda: len(self.one.status().members) >= self.company)
            self.met.set()
            train(self.one, self.problems[0])
            self.over.set()


@contextmanager
def first_peer(manifest: Manifest, folder: Path, company: int = 1) -> Iterator[First]:
    """In ``peer0`` of the folder."""
    first = First(manifest, folder, company)
    thread = threading.Thread(target=first.live, daemon=True)
    thread.start()
    try:
        assert first.invited.wait(PATIENCE)
        yield first
    finally:
        first.one.leave()
        thread.join(PATIENCE)
    assert not thread.is_alive()


def finished(manifest: Manifest, out: Path, **settings: Any) -> tuple[str, int, int]:
    """A folder in which a run was trained to its end; digest, rounds and inner steps."""
    problem = Problem(0)
    with joined(manifest, problem, out, **settings) as peer:
        train(peer, problem)
        return peer.anchor_digest, peer.round, peer.inner_steps


def test_the_merge_at_the_end_of_a_gossip_run_is_no_seventh_of_six_rounds(tmp_path: Path) -> None:
    problem = Problem(0)
    with alone(tmp_path, run_terms("noloco", inner={"steps": 2}), problem) as peer:
        train(peer, problem)
    assert (peer.status().round, peer.status().rounds_seen) == (6, 0)  # whoever is alone has nobody to miss


@pytest.mark.parametrize("preset", long_but(["sparseloco", "noloco"], ["sparseloco", "streaming", "noloco"]))
def test_a_folder_that_holds_the_last_commit_is_done_at_once_and_asks_nobody(tmp_path, preset, caplog):
    manifest = run_terms(preset, run={"rounds": 3})
    ended = finished(manifest, tmp_path)
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    caplog.clear()
    again = Problem(1)
    with joined(manifest, again, tmp_path, **NOWHERE) as peer:
        assert peer.done
        assert (peer.anchor_digest, peer.round, peer.inner_steps) == ended
        assert torch.equal(again.flat(), torch.cat(peer.anchor()))
        assert peer.invite == ""
    assert read_status(tmp_path).state == "done"
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == kept
    assert told(caplog) == [WAS_OVER.format(tmp_path)]


def test_a_last_commit_that_only_the_journal_holds_is_made_a_checkpoint_without_training(tmp_path):
    manifest = run_terms("sparseloco", run={"rounds": 3})
    ended = finished(manifest, tmp_path, checkpoint_every=1000)
    shutil.rmtree(max((tmp_path / "checkpoints").iterdir()))  # as a kill right after the commit leaves it
    again = Problem(0)
    with joined(manifest, again, tmp_path, **NOWHERE) as peer:
        assert peer.done
        assert (peer.anchor_digest, peer.round) == ended[:2]
        anchors = peer.anchor()
    assert all(map(torch.equal, anchors_kept(tmp_path), anchors))


@pytest.mark.parametrize("preset", long_but(["noloco"], ["sparseloco", "noloco"]))
def test_a_newcomer_gets_the_last_state_from_a_peer_that_keeps_serving(tmp_path, preset, caplog):
    with first_peer(run_terms(preset, run={"rounds": 2}), tmp_path) as first:
        assert first.over.wait(PATIENCE)
        late = Problem(1)
        with joined(first.invite, late, tmp_path / "b", require_peers=2) as peer:
            assert peer.done
            assert peer.anchor_digest == first.one.anchor_digest
            assert peer.inner_steps == 0
    assert OVER.format(tmp_path / "b") in caplog.messages
    export(tmp_path / "b/checkpoints", tmp_path / "model")
    assert all(map(torch.equal, anchors_kept(tmp_path / "b"), anchors_kept(tmp_path / "peer0")))


@pytest.fixture(autouse=True)
def everything_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "decentral.peer")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged; not that the problem's optimizer is another than the manifest's, which it is, and no thanks."""
    return [message for message in caplog.messages if not message.startswith(("inner optimizer: ", "you gave "))]


@pytest.mark.parametrize("preset", ["sparseloco", pytest.param("noloco", marks=pytest.mark.long)])
def test_a_member_that_was_away_at_the_end_comes_back_to_the_last_state(tmp_path, preset, caplog):
    with first_peer(run_terms(preset, run={"rounds": 8}), tmp_path, company=2) as first:
        mine = Problem(1)
        with joined(first.invite, mine, tmp_path / "b") as peer:
            assert first.met.wait(PATIENCE)  # two gossip rounds alone can be over before the first peer saw this one
            train(peer, mine, rounds=2)
            made = peer.round
        said = f"left after {made} of 8 rounds; the run goes on without this peer; loop until peer.done"
        assert said in caplog.messages
        assert first.over.wait(PATIENCE)
        back = Problem(1)
        with joined(first.invite, back, tmp_path / "b") as peer:
            train(peer, back)
            assert peer.anchor_digest == first.one.anchor_digest
    assert caplog.messages.count(OVER.format(tmp_path / "b")) == 1
    assert all(map(torch.equal, anchors_kept(tmp_path / "b"), anchors_kept(tmp_path / "peer0")))


def test_a_finished_folder_serves_again_when_it_is_asked_to(tmp_path):
    manifest = run_terms("sparseloco", run={"rounds": 2})
    digest, _, _ = finished(manifest, tmp_path / "peer0")
    with first_peer(manifest, tmp_path) as first:
        assert first.over.wait(PATIENCE)
        late = Problem(1)
        with joined(first.invite, late, tmp_path / "b") as peer:
            assert (peer.done, peer.anchor_digest) == (True, digest)


@pytest.mark.parametrize("asked", [False, True], ids=["it ends early", "it was asked to leave"])
def test_a_loop_that_ends_early_says_what_the_run_still_has_before_it_unless_it_was_asked_to_leave(
    tmp_path, caplog, asked
):
    problem = Problem(0)
    with alone(tmp_path, run_terms("sparseloco"), problem) as peer:
        if asked:
            peer.leave()
        train(peer, problem, rounds=2)
    early = ["left after 2 of 6 rounds; the run goes on without this peer; loop until peer.done"]
    assert told(caplog) == ([] if asked else early)


def test_who_is_left_alone_says_so_and_by_whom(tmp_path, caplog):
    manifest = run_terms("sparseloco", run={"rounds": 1000})
    problem, other = Problem(0), Problem(1)
    with joined(manifest, problem, tmp_path / "a") as peer:
        with joined(peer.invite, other, tmp_path / "b") as partner:
            until(lambda: bool(peer.swarm.node.company.here))
            name = partner.status().peer
        until(lambda: bool(peer.status().gone))
        until(lambda: peer.status().state == "looking", problem.step)
        until(lambda: f"alone: …{name[-6:]} left; " in read_status(tmp_path / "a").health, problem.step)
        assert peer.status().gone == (name,)
    assert f"alone: …{name[-6:]} left; the invite still lets others in" in caplog.messages


async def age_of(peer: Peer) -> float:
    return peer.swarm.node.age


def test_the_wait_for_a_second_peer_takes_none_of_the_runs_time_and_hears_pause_and_leave(tmp_path):
    problem, heard = Problem(0), []

    def steer() -> None:
        until(lambda: peer.status().state == "waiting")
        threading.Event().wait(0.5)
        heard.append(peer.swarm.call(age_of, peer) < 0.5)
        for request, state in (("pause", "paused"), ("resume", "waiting")):
            ask(tmp_path, request)
            until(lambda wanted=state: peer.status().state == wanted)
            heard.append(state)
        ask(tmp_path, "leave")

    with joined(run_terms("sparseloco"), problem, tmp_path) as peer:
        thread = threading.Thread(target=steer, daemon=True)
        thread.start()
        peer.wait_for_company()
        assert peer.done
        thread.join(PATIENCE)
    assert heard == [True, "paused", "waiting"]


def test_the_wait_for_a_second_peer_ends_when_one_comes_and_is_none_for_a_run_that_had_one(tmp_path):
    manifest = run_terms("sparseloco", run={"rounds": 1000})
    problem, other = Problem(0), Problem(1)
    with joined(manifest, problem, tmp_path / "a") as peer:
        with joined(peer.invite, other, tmp_path / "b"):
            peer.wait_for_company()
        assert (peer.done, peer.inner_steps) == (False, 0)
    with joined(manifest, problem, tmp_path / "a") as peer:
        peer.wait_for_company()
        assert not peer.done


def first_steps(peer: Peer, problem: Problem, steps: int = 1) -> threading.Thread:
    thread = threading.Thread(target=lambda: [problem.step() for _ in range(steps)], daemon=True)
    thread.start()
    until(lambda: peer.status().state == "waiting" or not thread.is_alive())
    return thread


def test_the_first_step_of_a_peers_life_waits_for_a_second_one(tmp_path: Path) -> None:
    manifest = run_terms("sparseloco", run={"rounds": 1000})
    problem, other = Problem(0), Problem(1)
    before = [one.detach().clone() for one in problem.model.parameters()]
    with joined(manifest, problem, tmp_path / "a", alone=False) as peer:
        steps = first_steps(peer, problem, 2)
        assert steps.is_alive(), "entering returned at once, and the step waits"
        assert all(torch.equal(*pair) for pair in zip(before, problem.model.parameters(), strict=True))
        with joined(peer.invite, other, tmp_path / "b", alone=False):
            steps.join(PATIENCE)
            assert peer.inner_steps == 2
            first_steps(peer, other).join(PATIENCE)  # nor does who was let in wait
    with joined(manifest, problem, tmp_path / "a", alone=False) as peer:
        first_steps(peer, problem).join(PATIENCE)
        assert peer.inner_steps == 3, "a peer that is resumed waits for nobody"


def test_a_peer_that_made_a_round_alone_as_it_was_told_does_not_wait_when_it_is_started_again(tmp_path: Path) -> None:
    problem = Problem(0)
    with joined(run_terms("sparseloco"), problem, tmp_path) as peer:
        train(peer, problem, rounds=1)
        steps = peer.inner_steps
    with joined(run_terms("sparseloco"), problem, tmp_path, alone=False) as peer:
        first_steps(peer, problem).join(PATIENCE)
        assert peer.inner_steps == steps + 1


def test_who_is_asked_to_leave_at_its_first_step_has_made_it_ends_and_waits_again(tmp_path: Path) -> None:
    """To leave lets the step go that waits; the next life made the whole run alone."""
    problem = Problem(0)
    for steps in (1, 2):
        with joined(run_terms("sparseloco"), problem, tmp_path, alone=False) as peer:
            waits = first_steps(peer, problem)
            assert waits.is_alive()
            peer.leave()
            waits.join(PATIENCE)
            assert (peer.done, peer.inner_steps) == (True, steps)
        assert read_status(tmp_path).state == "left"


# ---- the run of a folder ----


def founded(out: Path, caplog: pytest.LogCaptureFixture, rounds: int = 0, **tables: Any) -> tuple[str, list[str]]:
    """The run that a script founds, or goes on with, by terms that it makes itself; and what it said at the end."""
    caplog.clear()
    caplog.set_level(logging.INFO, "decentral.peer")
    problem = Problem(0)
    terms = preset_manifest("diloco", rounds=3, steps=2, model={"task": "custom"}, **tables)
    with joined(terms, problem, out) as peer:
        train(peer, problem, rounds)
    return peer.manifest.run_id, caplog.messages


def test_a_script_that_draws_its_salt_goes_on_with_its_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, _ = founded(tmp_path, caplog, 1)
    again, _ = founded(tmp_path, caplog, 3)
    over, said = founded(tmp_path, caplog, 3)
    assert run == again == over
    assert WAS_OVER.format(tmp_path) in said
    with pytest.raises(ManifestMismatch, match="holds another run"):
        founded(tmp_path, caplog, outer={"momentum": 0.5})
    with pytest.raises(ManifestMismatch, match="holds another run"):
        founded(tmp_path, caplog, run={"salt": "given"})
    assert founded(tmp_path / "other", caplog)[0] != run


def test_a_preset_that_is_joined_again_is_the_same_run(tmp_path: Path) -> None:
    runs = set()
    for _ in range(2):
        problem = Problem(0)
        how = {"preset": "diloco", "rounds": 9, "steps": 2, "out": tmp_path, "alone": True}
        with join(model=problem.model, optimizer=problem.optimizer, **how, **NET) as peer:
            train(peer, problem, 1 + peer.round)
        runs.add(peer.manifest.digest)
    assert (len(runs), peer.round) == (1, 2)


def test_the_wait_for_a_second_peer_takes_no_longer_than_the_time_to_join(tmp_path):
    peer = joined(run_terms("sparseloco"), Problem(0), tmp_path, join_timeout=1.0)
    with pytest.raises(NoPeersError, match="1 of 2 peers within the time given to join_timeout"), peer:
        peer.wait_for_company()
    assert (peer.inner_steps, peer.status().state) == (0, "left")


def test_the_time_to_join_counts_from_the_call(tmp_path):
    peer = joined(run_terms("diloco"), Problem(0), tmp_path, require_peers=2, join_timeout=2.0)
    until(lambda: time.monotonic() > peer.settings.give_up_at)
    began = time.monotonic()
    with pytest.raises(NoPeersError, match="1 of 2 peers"), peer:
        pass
    assert time.monotonic() - began < 2.0


def test_status_and_checkpoint_count_the_rounds_that_are_made(tmp_path):
    manifest = run_terms("sparseloco", run={"rounds": 1000})
    problem, other = Problem(0), Problem(1)
    with joined(manifest, problem, tmp_path / "a") as peer:
        with joined(peer.invite, other, tmp_path / "b"):
            peer.wait_for_company()  # two records that change the membership: the chain is longer than the rounds
        until(lambda: len(peer.status().members) == 1)
        train(peer, problem, rounds=3)
        assert peer.status().round == 3
        assert peer.status().members[0]["round"] == 3
    assert max(path.name for path in (tmp_path / "a/checkpoints").iterdir()).endswith("-round-000003")


@pytest.mark.parametrize("paused", [False, True])
def test_who_finishes_has_left_and_at_once_where_no_round_would_come(tmp_path: Path, paused: bool) -> None:
    problem = Problem(0)
    with alone(tmp_path, run_terms("sparseloco"), problem) as peer:
        train(peer, problem, rounds=1)
        if paused:
            peer.pause()
        peer.finish()
        problem.step()
        assert peer.done or not paused
        train(peer, problem)
        assert peer.left
    assert read_status(tmp_path).state == "left"


@pytest.mark.parametrize("over", [False, True])
def test_a_peer_whose_last_checkpoint_fails_does_not_say_that_all_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    def full(part: Participation) -> None:
        raise DiskError("writing checkpoint failed (No space left on device)")

    problem, manifest = Problem(0), run_terms("sparseloco", run={"rounds": 2})
    with pytest.raises(DiskError), alone(tmp_path, manifest, problem) as peer:  # noqa: PT012 - its end raises
        train(peer, problem, rounds=2 if over else 1)
        monkeypatch.setattr("decentral.peer.participation.save_now", full)
        if not over:
            peer.leave()
    assert read_status(tmp_path).health.startswith("stopped: ")


def test_who_finishes_with_the_last_round_of_the_run_has_not_left_it(tmp_path: Path) -> None:
    problem = Problem(0)
    manifest = run_terms("sparseloco", run={"rounds": 2})
    with alone(tmp_path, manifest, problem) as peer:
        train(peer, problem, rounds=1)
        peer.finish()
        train(peer, problem)
        assert not peer.left
    assert read_status(tmp_path).state == "done"


def test_who_finishes_while_waiting_for_company_leaves_at_once(tmp_path: Path) -> None:
    problem = Problem(0)
    with joined(run_terms("sparseloco"), problem, tmp_path) as peer:
        waits = threading.Thread(target=peer.wait_for_company, daemon=True)
        waits.start()
        until(lambda: peer.status().state == "waiting")
        peer.finish()
        waits.join(PATIENCE)
        assert not waits.is_alive()
        assert peer.done


# ---- checkpoints that are written while training goes on ----

OFTEN = run_terms("diloco", run={"rounds": 1000}, inner={"steps": 2})


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    found = SlowDisk(monkeypatch, "tensors.safetensors")
    yield found
    found.open.set()


def test_a_slow_disk_does_not_hold_the_training_thread(tmp_path: Path, disk: SlowDisk) -> None:
    problem, events = Problem(0), list[Any]()
    with alone(tmp_path, OFTEN, problem, checkpoint_every=1, observer=events.append) as peer:
        disk.shut()
        train(peer, problem, rounds=peer.round + 1)
        assert disk.reached.wait(PATIENCE)
        train(peer, problem, rounds=peer.round + 4)
        live_N = problem.flat()
        assert peer.status().checkpoint_held_seconds is not None
        disk.open.set()
        train(peer, problem, rounds=peer.round + 4)
    told = [event for event in events if event["event"] == "checkpoint"]
    rounds = [event["round"] for event in told]
    assert rounds == sorted(rounds)
    assert {0, 1} < set(rounds)  # the first is waited for; while the disk stood still none was begun
    assert not {2, 3, 4} & set(rounds)
    assert all(event["bytes"] > live_N.nbytes and event["held"] >= 0.0 for event in told)
    assert told[-1]["outer_step"] == peer.round
    kept = load_newest(tmp_path / "checkpoints")
    assert kept is not None
    assert torch.equal(kept.tensors["live/0"], problem.flat())  # the last one is waited for


def test_what_is_written_late_is_what_was_taken(tmp_path: Path, disk: SlowDisk) -> None:
    problem = adam(0)
    with alone(tmp_path, OFTEN, problem, checkpoint_every=1) as peer:
        disk.shut()
        train(peer, problem, rounds=peer.round + 1)
        assert disk.reached.wait(PATIENCE)
        taken_N, steps = problem.flat(), peer.inner_steps
        moments = [problem.optimizer.state[one]["exp_avg"].clone() for one in problem.model.parameters()]
        train(peer, problem, rounds=peer.round + 3)
        disk.open.set()
        peer._part.behind.wait()
        kept = load_newest(tmp_path / "checkpoints")
    assert kept is not None
    assert kept.meta["inner_steps"] == steps
    assert torch.equal(kept.tensors["live/0"], taken_N)
    stored = [tensor for name, tensor in kept.tensors.items() if name.startswith("training/")]
    assert all(any(torch.equal(moment, tensor) for tensor in stored) for moment in moments)


def test_a_crash_in_the_middle_of_a_write_leaves_the_checkpoint_before_and_the_journal(
    tmp_path: Path, disk: SlowDisk
) -> None:
    problem = Problem(0)
    with alone(tmp_path / "a", OFTEN, problem, checkpoint_every=1) as peer:
        disk.shut()
        train(peer, problem, rounds=peer.round + 3)
        assert disk.reached.wait(PATIENCE)
        shutil.copytree(tmp_path / "a", tmp_path / "crashed")  # what a kill in this moment leaves
        anchor, steps = peer.anchor_digest, peer.inner_steps
        disk.open.set()
    before = load_newest(tmp_path / "crashed" / "checkpoints")
    assert before is not None
    assert before.meta["inner_steps"] < steps
    with alone(tmp_path / "crashed", OFTEN, Problem(0)) as again:
        assert again.anchor_digest == anchor


def test_a_disk_that_refuses_a_checkpoint_ends_the_loop_at_the_next_step(tmp_path: Path, disk: SlowDisk) -> None:
    problem = Problem(0)
    peer = alone(tmp_path, OFTEN, problem, checkpoint_every=1)
    with pytest.raises(DiskError, match="no space left on device"), peer:  # noqa: PT012 - as a user's loop
        disk.is_full = True
        train(peer, problem)
    assert peer.round < 10


def test_an_error_of_a_write_is_raised_once_and_the_next_one_goes_on() -> None:
    written, behind = list[int](), WriteBehind()
    behind.begin(lambda: written.append(1 // 0))
    with pytest.raises(ZeroDivisionError):
        behind.wait()
    behind.wait()
    behind.begin(lambda: written.append(1))
    behind.wait()
    assert written == [1]
    assert not behind.busy
