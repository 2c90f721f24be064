"""Peers that are one replica together: stages of a model, in a run with whole peers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from decentral.errors import ConfigError, NoPeersError
from decentral.manifest import Manifest
from decentral.peer.peer import Peer
from decentral.pipeline.stage import Segment, Stage
from decentral.pipeline.turns import count_micro_batches
from decentral.tensors.memory import offload_to
from decentral.training.part import Needs
from decentral.training.swarm_side import run_blocking
from decentral.wire.keys import peer_name
from tests.kit.patience import until
from tests.kit.problems import joined, run_together
from tests.kit.trainees import terms


class Residual(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.tanh(self.inner(inputs))


class Machine:
    """A model of three stages, its optimizer, and the data of one replica: its machines draw alike."""

    def __init__(self, data: int) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(*(Residual() for _ in range(3)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.003)
        self.data, self.batch = torch.Generator().manual_seed(data), None
        self.losses = list[float]()

    def step(self, peer: Peer) -> None:
        """A batch that no step was made with is the next one's."""
        if self.batch is None:
            self.batch = 0.2 * torch.randn(16, 6, generator=self.data)
        loss = self.gradients(peer, self.batch, torch.sin(self.batch))
        if loss is not None:
            self.losses.append(loss)
            self.optimizer.step()
            self.batch = None
        self.optimizer.zero_grad()

    def gradients(self, peer: Peer, inputs: Tensor, targets: Tensor) -> float | None:
        return peer.gradients(inputs, targets, mse_loss, clip=1.0)


class Masters(torch.optim.Optimizer):
    """Copies of the parameters in one flat tensor, where nobody finds them, written over those that have gradients."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        held = self.param_groups[0]["params"]
        self.flat, self.sizes = torch.cat([one.detach().flatten() for one in held]), [one.numel() for one in held]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for one, copy in zip(self.param_groups[0]["params"], self.flat.split(self.sizes), strict=True):
            if one.grad is not None:
                copy.sub_(one.grad.flatten(), alpha=self.param_groups[0]["lr"])
                one.copy_(copy.view_as(one))


class Uncut(Machine):
    """A model of its own class, which does not say in which segments it runs."""

    def __init__(self) -> None:
        super().__init__(0)
        self.model = nn.ModuleDict({"layers": self.model})


class Whole(Machine):
    """It adds up the gradients of as many micro-batches as a group of three does."""

    def gradients(self, peer: Peer, inputs: Tensor, targets: Tensor) -> float | None:
        count = count_micro_batches(len(inputs), 3)
        stage = Stage([Segment(layer, (layer,)) for layer in self.model], 0, 1)
        return run_blocking(stage.step(None, inputs.chunk(count), targets.chunk(count), mse_loss, clip=1.0))


@pytest.fixture(autouse=True)
def without_files() -> Iterator[None]:
    """Memory of a process lies where its last peer wanted it."""
    yield
    offload_to(None)


ONE = Needs().in_files([42] * 3, range(1))  # bytes that hold one stage
SHARING = {"share": True, "memory": ONE}


def stages(preset: str = "sparseloco", rounds: int = 8, steps: int = 6) -> Manifest:
    """``overlapped``: diloco whose rounds are made beside the next inner step."""
    made = terms("diloco" if preset == "overlapped" else preset, run={"rounds": rounds})
    overlap = 1 if preset == "overlapped" else made.outer.overlap
    outer = made.outer.model_copy(update={"fragments": 3, "layout": "stages", "overlap": overlap})
    inner = made.inner.model_copy(update={"steps": steps})
    patient = {"deadline_floor": 60.0, "deadline_ceiling": 120.0, "lease": 60.0, "shrink_after": 90.0}  # nobody is late
    swarm = made.swarm.model_copy(update=patient)
    return made.model_copy(update={"outer": outer, "inner": inner, "swarm": swarm})


@contextmanager
def swarm(
    folder: Path, manifest: Manifest, machines: list[Machine], given: list[dict[str, Any]]
) -> Iterator[list[Peer]]:
    """The first begins the run."""
    with ExitStack() as stack:
        peers = [stack.enter_context(joined(manifest, machines[0], folder / "0", **given[0]))]
        for number in range(1, len(machines)):
            out = folder / str(number)
            peers.append(stack.enter_context(joined(peers[0].invite, machines[number], out, **given[number])))
        yield peers


def train(peer: Peer, machine: Machine) -> None:
    until(lambda: peer.done, lambda: machine.step(peer))


def all_know(peers: list[Peer], stages: int) -> bool:
    """Tell whether all are members, and all know of so many that train a part."""

    def knows(peer: Peer) -> bool:
        driver, names = peer.swarm.node.driver, {one.status().peer for one in peers}
        parts = driver.machine.state.presence.parts
        known = sum(bool(part) and peer_name(one) in names for one, part in parts.items())
        return known == stages and {peer_name(one) for one in driver.head.members} == names

    return all(map(knows, peers))


def together(peers: list[Peer], machines: list[Machine]) -> None:
    """Train all; those that are whole begin when all know of a group."""
    stages, pause = sum(peer._shared is not None for peer in peers), threading.Event()

    def run(peer: Peer, machine: Machine) -> None:
        if peer._shared is None:
            until(lambda: all_know(peers, stages), lambda: pause.wait(0.05))
        train(peer, machine)

    run_together(*(partial(run, *pair) for pair in zip(peers, machines, strict=True)))


def stands_in_a_group(peer: Peer) -> bool:
    return len(peer.status().stages) == 3


def told(folder: Path, name: str) -> list[dict[str, Any]]:
    """The events of that name in a folder."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == name]


def contributors(folder: Path) -> list[int]:
    """Of each round, as a folder's events say."""
    return [len(event["contributors"]) for event in told(folder, "commit") if event.get("contributors")]


@pytest.mark.parametrize("preset", ["sparseloco", "overlapped", pytest.param("diloco", marks=pytest.mark.long)])
def test_a_group_of_three_is_one_replica_beside_two_whole_peers(preset: str, tmp_path: Path) -> None:
    machines = [Machine(data) for data in (0, 1, 2, 2, 2)]
    with swarm(tmp_path, stages(preset, 20), machines, [{}, {}, SHARING, SHARING, SHARING]) as peers:
        together(peers, machines)
        assert len({peer._up.swarm.node.replica.digest for peer in peers}) == 1
        told = [machine.losses for machine in machines[2:]]
        least = min(map(len, told))
        assert least >= 30, "all stages make the same steps, but for the last: one may know first that the run is over"
        assert all(one[:least] == told[0][:least] for one in told), "and know the same loss"
        assert told[0][-1] < 0.7 * told[0][0], "and learn"
    assert contributors(tmp_path / "0") == [3] * 20, "the group counts once in every fragment"


def test_a_group_leaves_the_anchor_that_a_whole_peer_leaves_bit_for_bit(tmp_path: Path) -> None:
    """A hundred inner steps, five rounds, beside another peer."""
    terms, digests = stages("diloco", rounds=5, steps=60), list[str]()
    for name, others, given in (("whole", [Whole(2)], [{}]), ("group", [Machine(2) for _ in range(3)], [SHARING] * 3)):
        machines = [Machine(1), *others]
        with swarm(tmp_path / name, terms, machines, [{}, *given]) as peers:
            together(peers, machines)
            digests.append(peers[0].anchor_digest)
            assert len(machines[0].losses) == 100
        assert contributors(tmp_path / name / "0") == [2] * 5
    assert digests[0] == digests[1]


def test_a_spare_takes_the_place_of_a_stage_that_leaves(tmp_path: Path) -> None:
    """The whole peer's rounds go on meanwhile, and the group counts again."""
    machines, pause, here = [Machine(data) for data in (0, 2, 2, 2, 2)], threading.Event(), dict[int, Peer]()
    founder = joined(stages(rounds=1000), machines[0], tmp_path / "0")

    def share(number: int) -> None:
        with joined(founder.invite, machines[number], tmp_path / str(number), **SHARING) as peer:
            here[number] = peer
            train(peer, machines[number])
            del here[number]

    def all_here(shares: int) -> bool:
        return len(here) == shares and all_know([founder, *here.values()], 3)

    def whole() -> None:
        until(lambda: all_here(4), lambda: pause.wait(0.05))
        until(lambda: founder.round >= 3, lambda: machines[0].step(founder))
        next(peer for peer in here.values() if stands_in_a_group(peer)).leave()
        until(lambda: all_here(3), lambda: machines[0].step(founder))
        made = founder.round
        until(lambda: founder.round >= made + 6, lambda: machines[0].step(founder))
        for peer in list(here.values()):
            peer.leave()

    with founder:
        run_together(whole, *(partial(share, number) for number in range(1, 5)))
    formed = [len(told(tmp_path / str(number), "group_formed")) for number in range(1, 5)]
    assert sorted(formed) == [1, 1, 2, 2], "the two that stayed were in both groups, who left and the spare in one"
    assert 2 in contributors(tmp_path / "0")[-6:]


@pytest.mark.parametrize(
    ("terms_", "make", "why"),
    [
        (lambda: terms("sparseloco", outer={"fragments": 2}), lambda: Machine(0), "no stages"),
        (lambda: stages(), Uncut, "nobody knows where"),
        (lambda: terms("noloco"), lambda: Machine(0), "train all of the model"),
    ],
    ids=["strided", "no segments", "gossip"],
)
def test_a_run_or_a_model_that_cannot_be_shared_is_refused_before_anything_begins(
    terms_: Any, make: Any, why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        joined(terms_(), make(), tmp_path, share=True)


def test_a_batch_of_another_shape_is_refused_before_others_wait_for_it(tmp_path: Path) -> None:
    machines = [Machine(2) for _ in range(3)]
    with swarm(tmp_path, stages(rounds=1000), machines, [SHARING] * 3) as peers:

        def run(peer: Peer, machine: Machine) -> None:
            until(lambda: len(machine.losses) >= 2, lambda: machine.step(peer))
            with pytest.raises(ConfigError, match="drop_last"):
                machine.gradients(peer, torch.zeros(10, 6), torch.zeros(10, 6))

        run_together(*(partial(run, *pair) for pair in zip(peers, machines, strict=True)))


def test_a_machine_that_finds_nobody_has_its_model_as_it_was(tmp_path: Path) -> None:
    """Before it is in the run its parameters lie in the files that the anchor is to lie in."""
    with joined(stages(rounds=1000), Machine(0), tmp_path / "0") as peer:
        invite = peer.invite
    machine, before = Machine(0), Machine(0)
    pairs = list(zip(machine.model.parameters(), before.model.parameters(), strict=True))
    with pytest.raises(NoPeersError):
        joined(invite, machine, tmp_path / "1", share=True, join_timeout=3.0).__enter__()
    assert all(mine.requires_grad and torch.equal(mine, theirs) for mine, theirs in pairs)
    machine.model(torch.ones(1, 6)).sum().backward()
    machine.optimizer.step()


def test_an_optimizer_that_undoes_commits_is_refused_for_a_stage_as_for_a_whole_peer(tmp_path: Path) -> None:
    machines, why = [Machine(data) for data in (0, 2, 2, 2)], list[str]()
    founder = joined(stages(rounds=1000), machines[0], tmp_path / "0")

    def share(number: int) -> None:
        machine = machines[number]
        machine.optimizer = Masters(machine.model.parameters(), lr=1e-4)
        with suppress(ConfigError), joined(founder.invite, machine, tmp_path / str(number), **SHARING) as peer:
            try:
                until(lambda: why or peer.done, lambda: machine.step(peer))
            except ConfigError as error:
                why.append(str(error))
                raise

    with founder:
        whole = partial(until, lambda: why, lambda: machines[0].step(founder))
        run_together(whole, *(partial(share, number) for number in range(1, 4)))
    assert "what commits write does not stay" in why[0]


def test_a_peer_that_does_not_share_makes_all_gradients_itself(tmp_path: Path) -> None:
    machine, other = Machine(0), Machine(0)
    with joined(stages(rounds=1000), machine, tmp_path) as peer:
        inputs = torch.randn(4, 6)
        loss = peer.gradients(inputs, torch.sin(inputs), mse_loss)
        mean = mse_loss(other.model(inputs), torch.sin(inputs))
        mean.backward()
        assert loss == mean.item()
        pairs = zip(machine.model.parameters(), other.model.parameters(), strict=True)
        assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)


def test_moments_of_before_a_restart_wait_for_a_group(tmp_path: Path) -> None:
    """Those of fragments that are another's stage then go when it is known."""
    machine = Machine(0)
    with joined(stages(rounds=1000), machine, tmp_path) as peer:
        until(lambda: len(machine.losses) >= 3, lambda: machine.step(peer))
    again = Machine(0)
    with joined(stages(rounds=1000), again, tmp_path, share=True):
        counts = [state["step"].item() for state in again.optimizer.state.values()]
        assert counts == [3.0] * len(list(again.model.parameters()))
        assert not any(parameter.requires_grad for parameter in again.model.parameters())
