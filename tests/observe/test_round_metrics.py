"""What rounds tell of the swarm: figures that are there, finite, and the same on all peers who see the same frames."""

from __future__ import annotations

import itertools
import math
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from decentral.flow.waiting import inline
from decentral.manifest import Manifest
from decentral.observe import contributions
from decentral.observe.contributions import RoundMetrics
from decentral.observe.diagnostics import (
    DEBT_RATIO,
    LOSS_DISPERSION,
    MEAN_COSINE,
    NAMES,
    NEVER_SENT,
    NORM_DISPERSION,
    REPLICA_DISTANCE,
    REPLICA_VARIANCE,
    ROUNDS,
    Diagnostics,
    Figures,
)
from decentral.observe.health import Notices
from decentral.optimizers.base import Contributor, Live, Speaking
from decentral.optimizers.diloco import DiLoCo
from decentral.replica.contents import FrameContents
from decentral.training.live_side import LiveSide
from decentral.training.schedule import SyncSchedule
from tests.kit.gossip_learners import Learner
from tests.kit.nodes import Lab, Member, run_in_lab, scene, small_terms
from tests.kit.tables import PRESETS, SYNCHRONOUS_WIRES, covering, long_but

ALIKE = (NORM_DISPERSION, MEAN_COSINE)
Told = list[list[Figures]]


def blocks() -> torch.nn.Module:
    """Enough of them for every preset's fragments, and small."""
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))


def wide() -> torch.nn.Module:
    """So large that each of three owns a part of a reduce: they are cut at multiples of 4096."""
    return torch.nn.Linear(128, 128)


def watch(member: Member, on_figures: Callable[[Figures], None] = lambda figures: None) -> None:
    """Have the rounds of a member looked at, as those of a peer are."""
    observer = RoundMetrics(member.node.replica, lambda event, fields: None, on_figures, inline)
    member.node.driver.state.observers = (observer,)


def swarm(
    manifest: Manifest,
    *,
    rounds: int = 4,
    kinds: tuple[type[Member], ...] = (Member,) * 3,
    make_model: Callable[[], torch.nn.Module] = blocks,
    spread: float = 1.0,
) -> tuple[list[Member], Told]:
    """The members of a run, and by member the figures of its rounds."""
    told, members = Told(), list[Member]()

    async def script(lab: Lab) -> None:
        members.extend(lab.add(kind=kind) for kind in kinds)
        for member in members:
            told.append([])
            watch(member, told[-1].append)
        await lab.all_members()
        seen = [len(one) for one in told]
        await lab.until(lambda: all(len(one) >= n + rounds for one, n in zip(told, seen, strict=True)))

    run_in_lab(manifest, script, make_model=make_model, spread=spread)
    return members, told


def by_step(told: Told) -> list[list[Figures]]:
    """Of each outer step that every peer told of, the figures of all."""
    found = defaultdict(list)
    for figures in itertools.chain(*told):
        found[figures.outer_step].append(figures)
    return [figures for figures in found.values() if len(figures) == len(told)]


# ---- every method ----


@pytest.mark.parametrize("preset", long_but((*covering(SYNCHRONOUS_WIRES), "noloco", "gasloc"), PRESETS))
def test_every_method_has_figures_that_are_finite_and_alike_on_all_peers_that_agree(preset, caplog):
    manifest = small_terms(preset)
    members, told = swarm(manifest, rounds=2 if manifest.exchange.kind != "pair" else 6)
    for figures in itertools.chain(*told):
        assert figures.values
        assert set(figures.values) <= set(NAMES)
        assert all(math.isfinite(value) for value in figures.values.values())
        assert figures.of_part == (manifest.exchange.kind == "reduce")
        assert 0 <= figures.values.get(NEVER_SENT, 0.0) <= 1
        assert -1 <= figures.values.get(MEAN_COSINE, 0.0) <= 1
        assert (DEBT_RATIO in figures.values) <= (manifest.compressor.feedback != "none")
    if manifest.exchange.kind == "gather":
        for first, *others in by_step(told):
            assert {one.contributors for one in others} == {first.contributors}
            for name in ALIKE:
                assert {one.values.get(name) for one in others} == {first.values.get(name)}
    if preset in ("noloco", "gasloc"):
        check_distances(members, told)
    assert not caplog.records, "nothing went wrong in making them"


def check_distances(members: list[Member], told: Told) -> None:
    """A pair tells how far its replicas are from one another."""
    for member, figures in zip(members, told, strict=True):
        by_number = {one.step + 1: one.disagreement for one in member.swaps if one.disagreement is not None}
        told_of = {one.outer_step: one.values[REPLICA_DISTANCE] for one in figures if REPLICA_DISTANCE in one.values}
        assert told_of
        assert {step: by_number[step] for step in told_of if step in by_number}.items() <= told_of.items()
        assert all(REPLICA_VARIANCE in one.values for one in figures if REPLICA_DISTANCE in one.values)


def test_the_figures_are_those_of_the_tensors_that_the_frames_decode_to(monkeypatch):
    """Sparse ones with a debt, as every peer measured them, against all that was sent, made dense."""
    dense: dict[bytes, torch.Tensor] = {}
    measure = FrameContents.measure

    def measured(self: FrameContents, frame: Any) -> Any:
        dense[frame.hash] = self.change(frame)
        return measure(self, frame)

    monkeypatch.setattr(FrameContents, "measure", measured)
    members, told = swarm(small_terms("sparseloco"), make_model=wide, rounds=5)
    records = {commit.record.outer_step + 1: commit.record for commit in members[0].log}
    looked_at = 0
    for figures in told[0]:
        sent = [dense[ref.frame] for ref in records[figures.outer_step].frames]
        if len(sent) < 3 or NORM_DISPERSION not in figures.values:
            continue
        norms, directions = torch.stack([one.norm() for one in sent]), [one / one.norm() for one in sent]
        pairs = [float(a @ b) for a, b in itertools.combinations(directions, 2)]
        assert figures.values[NORM_DISPERSION] == pytest.approx(float(norms.std(correction=0) / norms.mean()), rel=1e-4)
        assert figures.values[MEAN_COSINE] == pytest.approx(sum(pairs) / len(pairs), abs=0.08)
        looked_at += 1
    assert looked_at >= 3


def test_an_owner_of_a_reduce_tells_of_its_part():
    _, told = swarm(small_terms("diloco"), make_model=wide)
    assert all(one.of_part for one in itertools.chain(*told))
    met = [figures for figures in by_step(told) if all(one.contributors == 3 for one in figures)]
    assert met
    for figures in met:
        assert all(NORM_DISPERSION in one.values and MEAN_COSINE in one.values for one in figures)
        assert len({one.values[NEVER_SENT] for one in figures}) == 1, "of that, all have the whole"


# ---- what is wrong is said ----


def heard(
    manifest: Manifest, rounds: int, kinds: Sequence[type[Member]], make_model: Any = blocks, spread: float = 1.0
) -> list[list[dict[str, Any]]]:
    """By member the fields of its warnings, each with its sentence."""
    found = list[list[dict[str, Any]]]()

    async def script(lab: Lab) -> None:
        members = [lab.add(kind=kind) for kind in kinds]
        for member in members:
            found.append([])
            notices = Notices()

            def hear(event: str, fields: dict[str, Any], here: Any = found[-1], notices: Notices = notices) -> None:
                here.append({"event": event, "sentence": notices.hear(event, fields, "me"), **fields})

            watch(member, Diagnostics(hear).add_round)
        await lab.all_members()
        if manifest.exchange.kind == "pair":
            await lab.until(lambda: all(len(member.swaps) >= rounds for member in members))
        else:
            await lab.rounds(rounds)

    run_in_lab(manifest, script, make_model=make_model, spread=spread)
    return found


class Far(Member):
    """Pulls towards a target that is far from the others'."""

    def target(self, fragment: int) -> torch.Tensor:
        return 40 * super().target(fragment)


class Same(Member):
    """Wants what all others want."""

    def target(self, fragment: int) -> torch.Tensor:
        return torch.ones(self.lab.schema.fragments[fragment].numel)


class Steady(Member):
    """Learns the same in every round, wherever the anchor is."""

    def target(self, fragment: int) -> torch.Tensor:
        anchor = self.node.replica.anchors[fragment]
        return anchor + torch.linspace(1, 2, anchor.numel())


def plain() -> Manifest:
    dense = {"chain": "none", "feedback": "none"}
    return small_terms("sparseloco").changed(outer={"norm_clip": None}, compressor=dense)


def stingy() -> Manifest:
    """One value of 4,096 in each round: after so many rounds all but nothing was sent."""
    return small_terms("sparseloco").changed(compressor={"chain": "topk(k=1, chunk=4096)", "feedback": "ef(beta=1.0)"})


@pytest.mark.parametrize(
    ("manifest", "rounds", "kinds", "given", "figure", "sentence"),
    [
        (
            plain,
            ROUNDS + 6,
            (Member, Member, Far),
            {"spread": 0.1},
            NORM_DISPERSION,
            "one of them has another learning rate",
        ),
        (plain, 20, (Member,) * 3, {"spread": 0.1}, MEAN_COSINE, "undo one another"),
        (plain, ROUNDS + 6, (Same,) * 3, {}, MEAN_COSINE, "more peers bring nothing"),
        (
            lambda: small_terms("noloco"),
            12,
            (Member,) * 4,
            {},
            REPLICA_VARIANCE,
            "pairs pull them together less than training drives them apart",
        ),
        (
            stingy,
            38,
            (Steady,) * 2,
            {"make_model": lambda: torch.nn.Linear(64, 64)},
            DEBT_RATIO,
            "the compressor sends too little for its error feedback",
        ),
    ],
    ids=["an outlier", "each at its own optimum", "all do the same", "replicas drift apart", "a debt is never paid"],
)
def test_what_is_wrong_is_said_by_every_peer_alike(manifest, rounds, kinds, given, figure, sentence):
    told = heard(manifest(), rounds, kinds, **given)
    for warnings in told:
        of_figure = [one for one in warnings if one["figure"] == figure]
        assert any(sentence in one["sentence"] for one in of_figure)
        assert of_figure[0]["event"] == "out_of_band"
    if figure == NORM_DISPERSION:
        values = {(one["outer_step"], one["value"]) for one in itertools.chain(*told) if one["figure"] == figure}
        assert len({step for step, _ in values}) == len(values), "who warns of the same round has the same value"


class LossTold(Speaking, DiLoCo):
    """DiLoCo, whose summaries tell the loss that the loop logged."""

    def says(self, live: Live, fragment: int, sent: Sequence[torch.Tensor]) -> bytes:
        return struct.pack("<f", live.loss)

    def told_loss(self, contributor: Contributor) -> float:
        return float(struct.unpack("<f", contributor.summary)[0])


class Telling(Learner):
    """Under such a method."""

    losses = (2.0, 2.0, 6.0)

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        self.node.replica.method = LossTold()
        live = LiveSide(self.model, self.inner, self.signer.peer, lab.schema)
        self.schedule = SyncSchedule(self.interval, 0, self.node.replica.method, bytes(32), live=live)
        live.loss = self.losses[number]


@pytest.mark.parametrize("exchange", [pytest.param("gather", marks=pytest.mark.long), "reduce"])
def test_losses_that_a_methods_summaries_tell_are_compared_alike_on_every_peer(exchange):
    told = heard(small_terms("diloco").changed(exchange={"kind": exchange}), 8, (Telling,) * 3)
    for warnings in told:
        (one, *_) = [one for one in warnings if one["figure"] == LOSS_DISPERSION]
        assert one["sentence"].startswith("the peers' losses differ by 57% of their mean")


# ---- training does not depend on it ----


def breaks(*given: Any) -> Any:
    raise RuntimeError("a bug of ours")


@scene(peers=[Learner] * 2)
async def test_a_figure_that_raises_is_written_to_the_log_once_and_ends_no_round(lab, monkeypatch, caplog):
    monkeypatch.setattr(contributions, "compare", breaks)
    for member in lab.members:
        watch(member)
    await lab.rounds(4)
    lab.check_equal()
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 2, "one for each peer"
    assert "training is not affected" in caplog.text


class Watched(Learner):
    """Its rounds are looked at."""

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        watch(self)


@pytest.mark.parametrize("preset", ["diloco", "noloco"])
def test_the_anchors_are_the_same_bits_whether_anybody_looks(preset):
    digests = []
    for kind in (Learner, Watched):

        async def script(lab: Lab, kind: type[Learner] = kind) -> None:
            await lab.start([kind] * 2)
            await lab.until(lambda: all(member.node.outer_steps >= 6 for member in lab.members))
            digests.append([member.digests for member in lab.members])

        run_in_lab(small_terms(preset), script, make_model=blocks)
    assert digests[0] == digests[1]
