"""State that no gradient trains, among real peers: teachers, target networks, codebooks, queues, lists that grow."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import decentral
from tests.kit.problems import Swarm, joined, train
from tests.kit.tables import long_but, rows_but
from tests.kit.trainees import INPUTS, Trainee, answers, assert_alike, exported, pair, terms


class Taught(nn.Module):
    """A student and a frozen teacher, which follows it in every forward pass; both are asked in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(6, 6)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return self.student(inputs) + self.teacher(inputs)
        with torch.no_grad():
            self.follow()
        return self.student(inputs)

    def follow(self) -> None:
        for here, there in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            here.lerp_(there, 0.1)


class TaughtByData(Taught):
    """As BYOL and its kin are written."""

    def follow(self) -> None:
        for here, there in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            here.data = 0.9 * here.data + 0.1 * there.data


class Targeted(Taught):
    """A target network, a hard copy every third step, as of DQN; a new module each time, which is not frozen."""

    steps = 0

    def follow(self) -> None:
        self.steps += 1
        if self.steps % 3 == 0:
            self.teacher = copy.deepcopy(self.student)


class Quantised(nn.Module):
    """A codebook that follows what is encoded, as a frozen parameter, and the counts beside it as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)
        self.register_buffer("cluster_size", torch.ones(8))
        self.hold(torch.linspace(-2.0, 2.0, 32).view(8, 4))

    def hold(self, book: Tensor) -> None:
        self.book = nn.Parameter(book, requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        encoded = self.encoder(inputs)
        nearest = torch.cdist(encoded.detach(), self.book).argmin(1)
        if self.training:
            one_hot = nn.functional.one_hot(nearest, 8).float()
            self.cluster_size.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
            means = one_hot.T @ encoded.detach() / one_hot.sum(0).clamp(min=1.0)[:, None]
            self.book.data[nearest] = torch.lerp(self.book.data, means, 0.2)[nearest]
        return self.decoder(encoded + (self.book[nearest] - encoded).detach())


class QuantisedByABuffer(Quantised):
    """The same, the codebook a buffer."""

    def hold(self, book: Tensor) -> None:
        self.register_buffer("book", book)


class Queued(Taught):
    """A key encoder, a queue of its outputs and where in it the next ones go, as of MoCo; batches have 16."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(6, 64))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            at = int(self.queue_ptr)
            self.queue[:, at : at + len(inputs)] = self.teacher(inputs).detach().T
            self.queue_ptr[0] = (at + len(inputs)) % 64
        return super().forward(inputs)


class Spectral(nn.Module):
    """Vectors of a power iteration as buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.utils.spectral_norm(nn.Linear(6, 6)), nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


class TaughtAfresh(Taught):
    """A teacher of values of its own, which has to be named."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.teacher = nn.Linear(6, 6).requires_grad_(False)


MOVING: list[tuple[Callable[[], nn.Module], list[str] | None]] = [
    (Taught, None),
    (TaughtByData, None),
    (Targeted, None),
    (TaughtAfresh, ["teacher"]),
    (Quantised, ["book"]),
    (QuantisedByABuffer, None),
    (Queued, ["teacher.weight", "teacher.bias"]),
    (Spectral, None),
]


def begun(trainee: Trainee) -> Trainee:
    """Its teacher as most scripts make it, of the student."""
    if type(trainee.model) in (Taught, TaughtByData, Targeted, Queued):
        trainee.model.teacher.load_state_dict(trainee.model.student.state_dict())
    return trainee


def pair_of(make: Callable[[], nn.Module], folder: Path, **given: object) -> Swarm:
    swarm = pair(terms("sparseloco"), make, folder, **given)
    for trainee in swarm.problems:
        begun(trainee)
    return swarm


EVERY_KIND = pytest.mark.parametrize(
    ("make", "moved"), rows_but([MOVING[2], MOVING[4], MOVING[6]], MOVING), ids=lambda one: getattr(one, "__name__", "")
)


@EVERY_KIND
def test_it_is_the_same_for_all_peers_their_restarts_and_their_exports(tmp_path: Path, make, moved):
    swarm = pair_of(make, tmp_path, moved=moved)
    said, again = answers(swarm), begun(Trainee(make(), 1))
    with joined(swarm.manifest, again, tmp_path / "peer1", moved=moved):
        assert_alike(*said, again.says(), *(exported(make, tmp_path / f"peer{number}") for number in range(2)))
    assert not torch.allclose(said[0], Trainee(make(), 0).says())


@EVERY_KIND
def test_a_newcomer_begins_with_it_and_a_restart_goes_on_with_it(tmp_path: Path, make, moved):
    founder, newcomer, again = (begun(Trainee(make(), number)) for number in (0, 1, 0))
    manifest = terms("sparseloco", run={"rounds": 1000})
    with joined(manifest, founder, tmp_path / "0", moved=moved) as first:
        train(first, founder, 3)
        with joined(first.invite, newcomer, tmp_path / "1", moved=moved):
            assert_alike(founder.says(), newcomer.says())
        founder.step()  # between two rounds
    with joined(manifest, again, tmp_path / "0", moved=moved):
        assert_alike(founder.says(), again.says())


AROUND = {Taught: "teacher", TaughtByData: "teacher", Targeted: "teacher", Quantised: "book", Queued: "teacher"}
REFUSED = [(preset, make) for preset in ("sparseloco", "noloco") for make in AROUND]


@pytest.mark.parametrize(("preset", "make"), rows_but([REFUSED[1], REFUSED[2], REFUSED[-2]], REFUSED))
def test_where_nothing_moves_by_what_join_is_told_it_is_refused_at_the_first_boundary(tmp_path, preset, make):
    trainee, around = begun(Trainee(make(), 0)), AROUND[make]
    words = rf"^{around}.* is frozen, so that all peers have the same, but changed .*moved=\[\"{around}\"\]"
    with joined(terms(preset), trainee, tmp_path, moved=[]) as peer:
        with pytest.raises(decentral.ConfigError, match=words):
            train(peer, trainee, 1)
        assert peer.round == 0


def test_peers_that_name_other_parameters_are_told_the_name_and_the_keyword(tmp_path: Path):
    with joined(terms("sparseloco"), begun(Trainee(Taught(), 0)), tmp_path / "0") as first:
        refused = joined(first.invite, begun(Trainee(Taught(), 1)), tmp_path / "1", moved=[])
        words = r"teacher\.weight: frozen here, a buffer in the run; its peers name it, or its module, in join\(moved"
        with pytest.raises(decentral.ManifestMismatch, match=words):
            refused.__enter__()


def test_pointers_into_a_queue_are_never_a_mean(tmp_path: Path):
    """Of a batch that divides it each is a multiple, wherever its peer began; a mean of two fits nothing."""
    seen = set()

    class Noting(Trainee):
        def step(self) -> float:
            loss = super().step()
            seen.add(int(self.model.queue_ptr))
            return loss

    trainees = [begun(Noting(Queued(), number)) for number in range(2)]
    trainees[1].model.queue_ptr[0] = 48
    Swarm(terms("sparseloco"), tmp_path, *trainees).ends_alike()
    assert seen == {0, 16, 32, 48}


class Listing(nn.Module):
    """A list of all that it saw, as a buffer that grows, and how long it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("length", torch.tensor(1))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen = torch.cat([self.seen, inputs.mean().view(1)])
            self.length += 1
        assert len(self.seen) == int(self.length)
        return self.weight(inputs)


@pytest.mark.parametrize("policy", long_but(["average"], ["average", "own"]))
def test_a_buffer_that_grows_stays_a_peers_own_with_a_word_and_comes_back_with_its_checkpoint(tmp_path, caplog, policy):
    swarm = pair(terms("sparseloco", model={"buffers": policy}), Listing, tmp_path)
    assert_alike(*answers(swarm))
    words = [record.getMessage() for record in caplog.records if record.name == "decentral.training"]
    grew = [line for line in words if line.startswith("the buffer seen was (1,) of floats at the join and is")]
    assert len(grew) == (2 if policy == "average" else 0)  # peers; where all are their own there is nothing to say
    again = Trainee(Listing(), 1)
    with joined(swarm.manifest, again, tmp_path / "peer1"):
        assert torch.equal(again.model.seen, swarm.problems[1].model.seen)
        again.model.train()
        again.model(INPUTS)
    assert len(again.model.seen) >= 17


def test_a_newcomer_begins_its_own_list_where_the_run_began(tmp_path: Path):
    founder, newcomer = Trainee(Listing(), 0), Trainee(Listing(), 1)
    with joined(terms("sparseloco", run={"rounds": 1000}), founder, tmp_path / "0") as first:
        train(first, founder, 3)
        with joined(first.invite, newcomer, tmp_path / "1") as second:
            assert (len(newcomer.model.seen), int(newcomer.model.length)) == (1, 1)
            train(second, newcomer, second.round)
            newcomer.step()
