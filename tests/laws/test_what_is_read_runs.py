"""What is read is what runs: where the function that one reads raises, every round that uses it stops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from decentral.optimizers import OuterMethod, make_outer
from decentral.replica.replica import OuterStep, Replica
from tests.kit import learners
from tests.kit.learners import Learners, codec_of
from tests.kit.replicas import NUMEL
from tests.kit.tables import PRESETS, SYNCHRONOUS


class Stop(Exception):
    """Of the function that is read."""


def stopped(*given: object) -> Any:
    raise Stop


def steps_of(number: int) -> dict[int, Tensor]:
    return {n: torch.randn(NUMEL, generator=torch.Generator().manual_seed(9 * number + n)) for n in range(3)}


def a_round(run: Learners) -> Callable[[], None]:
    """All train, and one round takes what they learnt; its frames are kept as they are when they arrive."""

    def go() -> None:
        run.learn(steps_of(run.head.round))
        if run.method.topology == "pair":
            run.meet((0, 1, 2))
            return
        offered = run.offer((0, 1, 2))
        run.learn(steps_of(run.head.round + 5))  # training goes on while they are in flight
        for peer in run.peers:
            for frame in offered.frames.values():
                peer.replica.contents.payloads(frame)
        run.commit(offered)

    return go


def anchors_of(run: Learners) -> list[Tensor]:
    return [peer.anchor_N for peer in run.peers]


def assert_nothing_is_applied(run: Learners, go: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is durable by then, so that no process ends: nothing moves, on every peer alike, and all are told."""
    told, before = [], anchors_of(run)
    outer_step = learners.outer_step

    def listening(replica: Replica, *args: Any, **more: Any) -> OuterStep:
        told.append(outer_step(replica, *args, **more))
        return told[-1]

    monkeypatch.setattr(learners, "outer_step", listening)
    go()
    assert all(torch.equal(one_N, two_N) for one_N, two_N in zip(before, anchors_of(run), strict=True))
    assert {step.unmoved for step in told} <= {"outer_step raised Stop: "}
    assert run.method.topology == "pair" or len(told) == len(run.peers)


def assert_it_is_raised(run: Learners, go: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the training loop, before anything is sent or written."""
    with pytest.raises(Stop):
        go()


# By function of a method, the presets whose rounds use it, and how a round stops. That of a compressor is a row, too.
FUNCTIONS: Mapping[str, tuple[tuple[str, ...], Callable[..., None]]] = {
    "outer_step": (PRESETS, assert_nothing_is_applied),
    "contribute": (PRESETS, assert_it_is_raised),
    "merge": (SYNCHRONOUS, assert_it_is_raised),  # gossip replaces the live model by the replica
}


@pytest.mark.parametrize(
    ("function", "name"), [(function, name) for function, (names, _) in FUNCTIONS.items() for name in names]
)
def test_a_round_stops_where_the_function_raises_that_one_reads(
    monkeypatch: pytest.MonkeyPatch, function: str, name: str
) -> None:
    method: OuterMethod = make_outer(name, {})
    run = Learners(method, 3, torch.zeros(NUMEL), codec_of(method))
    go, (_, stops) = a_round(run), FUNCTIONS[function]
    before = anchors_of(run)
    for _ in range(2):  # one of them steps a round late
        go()
    assert any(not torch.equal(one_N, two_N) for one_N, two_N in zip(before, anchors_of(run), strict=True))
    read = next(one for one in type(method).__mro__ if function in vars(one))  # a default, where it has none of its own
    monkeypatch.setattr(read, function, stopped)
    stops(run, go, monkeypatch)
