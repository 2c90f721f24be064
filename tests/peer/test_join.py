"""join() in a real training loop, with real daemons on loopback."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
import torch
from torch import nn

import decentral
from decentral.errors import DiskError
from decentral.manifest import Manifest
from decentral.observe.requests import ask
from decentral.observe.status import ProcessInfo, Status, read_status, write_status
from decentral.peer import fetch_manifest, join
from decentral.swarm.identity import Identity
from decentral.swarm.invite import Invite
from decentral.transport.native.transport import NativeTransport
from tests.kit.patience import until
from tests.kit.problems import LOOPBACK, NET, Problem, Swarm, adam, alone, joined, run_terms, told, train
from tests.kit.tables import ALONG_DIRECTIONS, WIRES, covering, long_but


class Pair(Swarm):
    """On real daemons; each with the model that it ends with."""

    logs = True

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        given = {"require_peers": 0, "checkpoint_every": 2, "alone": False, "transport": "daemon"}
        super().__init__(manifest, folder, Problem(0), Problem(1), **given)


@pytest.mark.parametrize("preset", long_but(covering(WIRES), WIRES))
def test_two_peers_train_one_model_and_end_with_the_same_bits(tmp_path, preset):
    pair = Pair(run_terms(preset), tmp_path).ends_alike()
    if preset not in ALONG_DIRECTIONS:  # whose steps are random at the rate of this loop
        assert all(losses[-1] < losses[0] for losses in pair.losses.values())
    if not pair.manifest.outer.overlap:  # else the steps since the last contribution are a peer's own
        assert torch.equal(*(problem.flat() for problem in pair.problems))


@pytest.mark.parametrize("lan", [True, False])
def test_a_peer_says_how_it_stands_on_the_local_network_unless_it_stays_off_it(tmp_path, lan):
    events = list[dict[str, Any]]()
    with joined(run_terms("sparseloco"), Problem(0), tmp_path, lan=lan, observer=events.append):
        pass
    said = [event for event in events if event["event"] == "lan"]
    assert said == ([{"event": "lan", "off": "this peer listens on no private network"}] if lan else [])


def test_a_restarted_peer_stands_at_the_digest_it_had(tmp_path):
    manifest, problem, again = run_terms("sparseloco", run={"rounds": 1000}), Problem(0), Problem(0)
    with joined(manifest, problem, tmp_path, transport="daemon", checkpoint_every=3) as peer:
        train(peer, problem, rounds=4)
        stood, live = (peer.anchor_digest, peer.inner_steps, peer.round), problem.flat()
    with joined(manifest, again, tmp_path, transport="daemon") as peer:
        assert (peer.anchor_digest, peer.inner_steps, peer.round) == stood
        assert torch.equal(again.flat(), live)


def test_the_inner_optimizers_state_is_never_touched_by_an_outer_step(tmp_path):
    manifest = run_terms("diloco", inner={"steps": 2}, outer={"fragments": 1, "overlap": 0})
    problem = adam(0)
    with alone(tmp_path, manifest, problem) as peer:
        problem.step()
        hooks = []
        state = problem.optimizer.state[problem.model.head.weight]
        problem.optimizer.register_step_post_hook(lambda *_: hooks.append(state["exp_avg"].clone()))
        while peer.round < 2:
            problem.step()
            assert torch.equal(hooks[-1], state["exp_avg"])
        assert int(state["step"]) == peer.inner_steps


PLAIN = {"outer": {"learning_rate": 1.0, "momentum": 0.0}, "compressor": {"chain": "none"}}


def test_one_peer_with_rate_one_and_no_momentum_is_local_training(tmp_path):
    by_itself, in_a_run = Problem(0), Problem(0)
    with alone(tmp_path, run_terms("diloco", run={"rounds": 3}, **PLAIN), in_a_run) as peer:
        while not peer.done:
            in_a_run.step()
            by_itself.step()
    torch.testing.assert_close(in_a_run.flat(), by_itself.flat(), rtol=1e-5, atol=1e-6)


def test_every_step_a_round_with_sgd_is_data_parallel_sgd(tmp_path):
    """H = 1, rate 1, no momentum, uncompressed: the mean of the peers' steps is the step on the mean gradient."""
    patient = {"deadline_floor": 20.0, "lease": 60.0, "shrink_after": 60.0}  # a busy machine passes nobody by
    manifest = run_terms("diloco", run={"rounds": 5}, swarm=patient, inner={"steps": 1}, **PLAIN)
    pair = Swarm(manifest, tmp_path, Problem(0), Problem(1)).run()
    commits = told(pair.events[0], "commit")
    both = [event for event in commits if len(event["contributors"]) == 2]
    assert len(both) == len(commits), "a peer was passed by, the comparison would not be of equals"
    reference, streams = Problem(0), [Problem(0), Problem(1)]
    for _ in range(5):
        parameters = list(reference.model.parameters())
        gradients = [torch.autograd.grad(reference.loss(stream.batch()), parameters) for stream in streams]
        with torch.no_grad():
            for parameter, *both in zip(parameters, *gradients, strict=True):
                parameter -= 0.02 * sum(both) / 2
    torch.testing.assert_close(pair.problems[0].flat(), reference.flat(), rtol=1e-4, atol=1e-5)


def test_a_model_of_another_shape_is_refused_with_the_parameter_that_differs(tmp_path):
    other = Problem(1)
    other.model = nn.Linear(64, 32, bias=False)
    other.optimizer = torch.optim.SGD(other.model.parameters(), lr=0.1)
    with joined(run_terms("sparseloco", run={"rounds": 1000}), Problem(0), tmp_path / "a") as peer:
        refused = joined(peer.invite, other, tmp_path / "b")
        with pytest.raises(decentral.ManifestMismatch, match=r"weight"), refused:
            pass


def test_who_only_asks_for_the_terms_is_in_nobodys_invite(tmp_path):
    with joined(run_terms("sparseloco"), Problem(0), tmp_path / "a") as peer:
        before = peer.invite
        assert fetch_manifest(before, tmp_path / "b", **NET).digest == peer.manifest.digest
        assert peer.invite == before


def test_limits_of_a_peer_change_while_it_trains_and_it_finishes_after_a_round(tmp_path):
    problem, manifest = Problem(0), run_terms("sparseloco", run={"rounds": 1000})
    with joined(manifest, problem, tmp_path) as peer:
        assert read_status(tmp_path).run_id == manifest.digest.hex()
        for key, value in (("max-upload", "8mbit"), ("daily-upload", "3GB"), ("max-writes", "1GB"), ("threads", "1")):
            ask(tmp_path, "set", key=key, value=value)
        until(lambda: read_status(tmp_path).max_upload == 1e6, problem.step)
        assert read_status(tmp_path).daily_upload == 3 * 10**9
        until(lambda: read_status(tmp_path).max_writes == 10**9, problem.step)
        until(lambda: read_status(tmp_path).preferences == {"threads": "1"}, problem.step)
        ask(tmp_path, "set", key="max-upload", value="none")
        until(lambda: read_status(tmp_path).max_upload is None, problem.step)
        ask(tmp_path, "finish")
        train(peer, problem)
        assert peer.status().state == "leaving", "the run is not over"
        progress = peer._begun.loop.schedule.progress
        assert not any(one.steps for one in progress), "it left with a round, and nothing of its work is lost"
    assert 0 < peer.round < 1000
    last = read_status(tmp_path)
    assert (last.state, last.inner_steps) == ("left", peer.inner_steps)


def test_a_folder_in_which_another_process_trains_is_refused(tmp_path):
    other = psutil.Process(os.getppid())
    write_status(tmp_path, Status(), ProcessInfo(other.pid, other.create_time()))
    second = joined(run_terms("sparseloco"), Problem(0), tmp_path)
    with pytest.raises(decentral.ConfigError, match="a peer runs here already"), second:
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_folder_of_another_run_is_refused_as_another_run(tmp_path):
    with joined(run_terms("sparseloco"), Problem(0), tmp_path):
        pass
    other = joined(run_terms("diloco"), Problem(0), tmp_path)
    with pytest.raises(decentral.ManifestMismatch, match="holds another run"), other:
        pass


def test_a_peer_invites_nobody_before_it_can_be_reached(tmp_path):
    said: list[str] = []

    class Asked(NativeTransport):
        async def __aenter__(self) -> Self:
            said.append(peer.invite)
            return await super().__aenter__()

    transport = Asked(Identity.load_or_create(tmp_path / "identity.key").signer, listen=LOOPBACK)
    problem = Problem(0)
    peer = join(run_terms("diloco"), problem.model, problem.optimizer, out=tmp_path, transport=transport, alone=True)
    with peer:
        assert Invite.parse(peer.invite).addresses
    assert said == [""]


def test_required_peers_that_do_not_come_end_with_no_peers(tmp_path):
    lonely = joined(run_terms("diloco"), Problem(0), tmp_path, require_peers=2, join_timeout=1.0, alone=False)
    with pytest.raises(decentral.NoPeersError, match="1 of 2"), lonely:
        pass


def test_a_founder_without_any_checkpoint_comes_back_to_its_chain_and_founds_no_other(tmp_path):
    manifest, digests = run_terms("sparseloco"), []
    for rounds in (2, 0):
        problem = Problem(0)
        with alone(tmp_path, manifest, problem) as peer:
            train(peer, problem, rounds)
            digests.append((peer.round, peer.anchor_digest))
        shutil.rmtree(tmp_path / "checkpoints")
    assert digests[0] == digests[1]


def test_a_full_disk_ends_a_training_loop_that_waits_for_its_round_at_once(tmp_path):
    manifest, full = run_terms("sparseloco", outer={"overlap": 0}, swarm={"min_peers": 2}), list[float]()
    problem = Problem(0)

    def fill_the_disk() -> None:
        full.append(time.monotonic())
        peer.swarm.node.driver.steps.failure = DiskError("no space left")

    with pytest.raises(DiskError), alone(tmp_path, manifest, problem) as peer:  # noqa: PT012 - as a user's loop
        threading.Timer(0.5, fill_the_disk).start()
        while True:
            problem.step()
    assert time.monotonic() - full[0] < manifest.swarm.deadline_ceiling
