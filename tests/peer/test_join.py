"""join() in a real training loop, with real daemons on loopback."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
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
from decentral.peer import Peer, fetch_manifest, join
from decentral.swarm.identity import Identity
from decentral.swarm.invite import Invite
from decentral.transport.daemon.transport import DaemonTransport
from decentral.transport.memory import MemoryNetwork
from tests.kit.problems import LOOPBACK, Problem, run_terms, run_together
from tests.kit.tables import ALONG_DIRECTIONS, WIRES, covering, long_but


class Pair:
    """A founder and the peers it invites, each training its own copy until the run is done."""

    def __init__(self, manifest: Manifest, folder: Path, count: int = 2) -> None:
        self.manifest, self.folder, self.count = manifest, folder, count
        self.invited = threading.Event()
        self.invite = ""
        self.digests: dict[int, str] = {}
        self.losses: dict[int, list[float]] = {}
        self.models: dict[int, torch.Tensor] = {}
        self.events: dict[int, list[dict[str, Any]]] = {}

    def run(self) -> None:
        run_together(*(lambda n=n: self.peer(n) for n in range(self.count)))

    def peer(self, number: int) -> None:
        problem = Problem(number)
        if number:
            assert self.invited.wait(60)
        events = self.events.setdefault(number, [])
        with join(
            self.invite if number else self.manifest,
            problem.model,
            problem.optimizer,
            out=self.folder / f"peer{number}",
            listen=LOOPBACK,
            observer=events.append,
            require_peers=0,
            checkpoint_every=2,
        ) as peer:
            if not number:
                self.invite = peer.invite
                self.invited.set()
            self._wait_for_all(peer)
            losses = self.losses.setdefault(number, [])
            while not peer.done:
                losses.append(problem.step())
                peer.log(loss=losses[-1])
            self.digests[number] = peer.anchor_digest
        self.models[number] = problem.flat()

    def _wait_for_all(self, peer: Peer) -> None:
        end = threading.Event()
        for _ in range(600):
            if len(peer.status().members) == self.count:
                return
            end.wait(0.1)
        raise AssertionError("not all peers came")


@pytest.mark.parametrize("preset", long_but(("sparseloco", *covering(WIRES)), WIRES))
def test_two_peers_train_one_model_and_end_with_the_same_bits(tmp_path, preset):
    pair = Pair(run_terms(preset), tmp_path)
    pair.run()
    assert pair.digests[0] == pair.digests[1]
    if preset not in ALONG_DIRECTIONS:  # whose steps are random at the rate of this loop
        assert all(losses[-1] < losses[0] for losses in pair.losses.values())
    if not pair.manifest.outer.overlap:  # else the steps since the last contribution are a peer's own
        assert torch.equal(pair.models[0], pair.models[1])


@pytest.mark.parametrize("lan", [True, False])
def test_a_peer_says_how_it_stands_on_the_local_network_unless_it_stays_off_it(tmp_path, lan):
    problem, events = Problem(0), []
    manifest = run_terms("sparseloco", run={"rounds": 1})
    with join(
        manifest,
        problem.model,
        problem.optimizer,
        out=tmp_path,
        listen=LOOPBACK,
        lan=lan,
        observer=events.append,
        alone=True,
    ):
        pass
    said = [event for event in events if event["event"] == "lan"]
    assert said == ([{"event": "lan", "off": "this peer listens on no private network"}] if lan else [])


def test_a_restarted_peer_stands_at_the_digest_it_had(tmp_path):
    manifest = run_terms("sparseloco", run={"rounds": 1000})
    problem = Problem(0)
    with join(
        manifest, problem.model, problem.optimizer, out=tmp_path, listen=LOOPBACK, checkpoint_every=3, alone=True
    ) as peer:
        while peer.round < 4:
            problem.step()
        digest, steps, round_ = peer.anchor_digest, peer.inner_steps, peer.round
        live = problem.flat()
    again = Problem(0)
    with join(manifest, again.model, again.optimizer, out=tmp_path, listen=LOOPBACK, alone=True) as peer:
        assert (peer.anchor_digest, peer.inner_steps, peer.round) == (digest, steps, round_)
        assert torch.equal(again.flat(), live)


def test_the_inner_optimizers_state_is_never_touched_by_an_outer_step(tmp_path):
    manifest = run_terms("diloco", inner={"steps": 2}, outer={"fragments": 1, "overlap": 0})
    problem = Problem(0)
    problem.optimizer = torch.optim.AdamW(problem.model.parameters(), lr=0.01)
    with join(manifest, problem.model, problem.optimizer, out=tmp_path, listen=LOOPBACK, alone=True) as peer:
        problem.step()
        hooks = []
        state = problem.optimizer.state[problem.model.head.weight]
        problem.optimizer.register_step_post_hook(lambda *_: hooks.append(state["exp_avg"].clone()))
        while peer.round < 2:
            problem.step()
            assert torch.equal(hooks[-1], state["exp_avg"])
        assert int(state["step"]) == peer.inner_steps


def test_one_peer_with_rate_one_and_no_momentum_is_local_training(tmp_path):
    outer = {"learning_rate": 1.0, "momentum": 0.0}
    manifest = run_terms("diloco", outer=outer, compressor={"chain": "none"}, run={"rounds": 3})
    alone, joined = Problem(0), Problem(0)
    with join(manifest, joined.model, joined.optimizer, out=tmp_path, listen=LOOPBACK, alone=True) as peer:
        while not peer.done:
            joined.step()
            alone.step()
    torch.testing.assert_close(joined.flat(), alone.flat(), rtol=1e-5, atol=1e-6)


def test_every_step_a_round_with_sgd_is_data_parallel_sgd(tmp_path):
    """H = 1, rate 1, no momentum, uncompressed: the mean of the peers' steps is the step on the mean gradient."""
    tables = {"inner": {"steps": 1}, "outer": {"learning_rate": 1.0, "momentum": 0.0}, "compressor": {"chain": "none"}}
    patient = {"deadline_floor": 20.0, "lease": 60.0, "shrink_after": 60.0}  # a busy machine passes nobody by
    manifest = run_terms("diloco", run={"rounds": 5}, swarm=patient, **tables)
    pair = Pair(manifest, tmp_path)
    pair.run()
    commits = [e for e in pair.events[0] if e["event"] == "commit"]
    both = [e for e in commits if len(e["contributors"]) == 2]
    assert len(both) == len(commits), "a peer was passed by, the comparison would not be of equals"
    reference, streams = Problem(0), [Problem(0), Problem(1)]
    for _ in range(5):
        gradients = []
        for stream in streams:
            inputs = torch.randn(32, 64, generator=stream.data)
            loss = (reference.model(inputs) - inputs @ reference.goal.T).square().mean()
            gradients.append(torch.autograd.grad(loss, list(reference.model.parameters())))
        with torch.no_grad():
            for parameter, *both in zip(reference.model.parameters(), *gradients, strict=True):
                parameter -= 0.02 * sum(both) / 2
    torch.testing.assert_close(pair.models[0], reference.flat(), rtol=1e-4, atol=1e-5)


def test_a_model_of_another_shape_is_refused_with_the_parameter_that_differs(tmp_path):
    manifest = run_terms("sparseloco", run={"rounds": 1000})
    problem = Problem(0)
    with join(manifest, problem.model, problem.optimizer, out=tmp_path / "a", listen=LOOPBACK, alone=True) as peer:
        other = nn.Linear(64, 32, bias=False)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        refused = join(peer.invite, other, optimizer, out=tmp_path / "b", listen=LOOPBACK, alone=True)
        with pytest.raises(decentral.ManifestMismatch, match=r"weight"), refused:
            pass


def test_who_only_asks_for_the_terms_is_in_nobodys_invite(tmp_path):
    problem = Problem(0)
    settings = {"listen": LOOPBACK, "transport": "native", "lan": False}
    with join(
        run_terms("sparseloco"), problem.model, problem.optimizer, out=tmp_path / "a", **settings, alone=True
    ) as peer:
        before = peer.invite
        assert fetch_manifest(before, tmp_path / "b", **settings).digest == peer.manifest.digest
        assert peer.invite == before


def test_a_peer_of_a_training_loop_is_seen_and_steered_through_its_folder(tmp_path):
    problem = Problem(0)
    manifest = run_terms("sparseloco", run={"rounds": 1000})
    with join(
        manifest, problem.model, problem.optimizer, out=tmp_path, listen=LOOPBACK, transport="native", alone=True
    ) as peer:
        assert read_status(tmp_path).run_id == manifest.digest.hex()
        ask(tmp_path, "leave")
        deadline = time.monotonic() + 60
        while not peer.done and time.monotonic() < deadline:
            problem.step()
        assert peer.done
    assert read_status(tmp_path).state == "left"
    assert read_status(tmp_path).inner_steps == peer.inner_steps


def test_limits_of_a_peer_change_while_it_trains_and_it_finishes_after_a_round(tmp_path):
    problem = Problem(0)
    manifest = run_terms("sparseloco", run={"rounds": 1000})
    with join(
        manifest, problem.model, problem.optimizer, out=tmp_path, listen=LOOPBACK, transport="native", alone=True
    ) as peer:

        def train_until(met: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 60
            while not met():
                assert time.monotonic() < deadline
                problem.step()

        for key, value in (("max-upload", "8mbit"), ("daily-upload", "3GB"), ("threads", "1")):
            ask(tmp_path, "set", key=key, value=value)
        train_until(lambda: read_status(tmp_path).max_upload == 1e6)
        assert read_status(tmp_path).daily_upload == 3 * 10**9
        train_until(lambda: read_status(tmp_path).preferences == {"threads": "1"})
        ask(tmp_path, "set", key="max-upload", value="none")
        train_until(lambda: read_status(tmp_path).max_upload is None)
        ask(tmp_path, "finish")
        train_until(lambda: peer.done)
        assert peer.status().state == "leaving", "the run is not over"
        progress = peer._begun.loop.schedule.progress
        assert not any(one.steps for one in progress), "it left with a round, and nothing of its work is lost"
    assert 0 < peer.round < 1000
    assert read_status(tmp_path).state == "left"


def test_a_folder_in_which_another_process_trains_is_refused(tmp_path):
    other = psutil.Process(os.getppid())
    write_status(tmp_path, Status(), ProcessInfo(other.pid, other.create_time()))
    problem = Problem(0)
    second = join(run_terms("sparseloco"), problem.model, problem.optimizer, out=tmp_path, listen=LOOPBACK, alone=True)
    with pytest.raises(decentral.ConfigError, match="a peer runs here already"), second:
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_folder_of_another_run_is_refused_as_another_run(tmp_path):
    problem = Problem(0)
    settings = {"out": tmp_path, "listen": LOOPBACK, "transport": "native"}
    with join(run_terms("sparseloco"), problem.model, problem.optimizer, **settings, alone=True):
        pass
    other = join(run_terms("diloco"), problem.model, problem.optimizer, **settings, alone=True)
    with pytest.raises(decentral.ManifestMismatch, match="holds another run"), other:
        pass


def test_a_peer_invites_nobody_before_it_can_be_reached(tmp_path):
    said: list[str] = []

    class Asked(DaemonTransport):
        async def __aenter__(self) -> Self:
            said.append(peer.invite)
            return await super().__aenter__()

    problem = Problem(0)
    transport = Asked(Identity.load_or_create(tmp_path / "identity.key"), listen=LOOPBACK)
    peer = join(run_terms("diloco"), problem.model, problem.optimizer, out=tmp_path, transport=transport, alone=True)
    with peer:
        assert Invite.parse(peer.invite).addresses
    assert said == [""]


def test_required_peers_that_do_not_come_end_with_no_peers(tmp_path):
    problem = Problem(0)
    lonely = join(
        run_terms("diloco"),
        problem.model,
        problem.optimizer,
        out=tmp_path,
        listen=LOOPBACK,
        require_peers=2,
        join_timeout=1.0,
    )
    with pytest.raises(decentral.NoPeersError, match="1 of 2"), lonely:
        pass


def test_a_founder_without_any_checkpoint_comes_back_to_its_chain_and_founds_no_other(tmp_path):
    manifest, digests = run_terms("sparseloco"), []
    for rounds in (2, 0):
        identity = Identity.load_or_create(tmp_path / "identity.key")
        problem = Problem(0)
        transport = MemoryNetwork().transport(identity.signer)
        with join(manifest, problem.model, problem.optimizer, out=tmp_path, transport=transport, alone=True) as peer:
            while peer.round < rounds:
                problem.step()
            digests.append((peer.round, peer.anchor_digest))
        shutil.rmtree(tmp_path / "checkpoints")
    assert digests[0] == digests[1]


def train_until_the_disk_is_full(peer: Peer, problem: Problem, full: list[float]) -> None:
    def fill_the_disk() -> None:
        full.append(time.monotonic())
        peer.swarm.node.driver.steps.failure = DiskError("no space left")

    disk = threading.Timer(0.5, fill_the_disk)
    with peer:
        disk.start()
        while True:
            problem.step()


def test_a_full_disk_ends_a_training_loop_that_waits_for_its_round_at_once(tmp_path):
    manifest, full = run_terms("sparseloco", outer={"overlap": 0}).changed(swarm={"min_peers": 2}), []
    identity, problem = Identity.load_or_create(tmp_path / "identity.key"), Problem(0)
    transport = MemoryNetwork().transport(identity.signer)
    peer = join(manifest, problem.model, problem.optimizer, out=tmp_path, transport=transport, alone=True)
    with pytest.raises(DiskError):
        train_until_the_disk_is_full(peer, problem, full)
    assert time.monotonic() - full[0] < manifest.swarm.deadline_ceiling
