"""A peer that a framework entered and never left: what the end of the process does with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from decentral.errors import ConfigError
from decentral.integrations.callbacks import Entered
from decentral.observe.status import read_status
from decentral.peer.settings import JoinOptions, LoopOptions, PeerOptions
from decentral.tasks.batches import ShardPlace
from tests.kit.problems import Problem, alone, run_terms


@pytest.mark.parametrize(("last", "state"), [(KeyboardInterrupt(), "left"), (ValueError("mine"), "looking")])
def test_an_interrupt_and_an_error_keep_what_the_last_step_left_and_only_the_first_has_left(
    tmp_path, monkeypatch, last, state
):
    entered, problem = Entered(), Problem(0)
    entered.enter(alone(tmp_path, run_terms("diloco"), problem, quiet=True))
    for _ in range(7):
        problem.step()
    monkeypatch.setattr(sys, "last_value", last, raising=False)
    entered._at_exit()
    assert entered.peer is None
    assert read_status(tmp_path).state == state
    written = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert "00000001-round-000001" in written


def test_another_training_loop_ends_the_peer_of_the_one_before(tmp_path):
    entered, problem = Entered(), Problem(0)
    peers: list[Any] = []
    for _ in range(2):  # in one folder: only one may run there
        peers.append(alone(tmp_path, run_terms("diloco"), problem, quiet=True))
        entered.enter(peers[-1])
        problem.step()
    assert entered.peer is peers[1]
    entered.leave()
    assert read_status(tmp_path).state == "left"


class Lines(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_streamed_data_is_shared_out_by_a_peer_that_enters_later():
    entered = Entered()
    shared = entered.shard(Lines())
    assert isinstance(shared, IterableDataset)
    assert list(shared) == list(range(8)), "nobody else is known yet"
    entered._peer = SimpleNamespace(shard_place=ShardPlace(rank=1, count=3))  # type: ignore[assignment]
    assert list(shared) == [1, 4, 7]
    assert list(entered.shard(iter("abcde"))) == ["b", "e"]


@pytest.mark.parametrize(
    ("given", "why"), [([1, 2], "a list has indices"), (3, "a int has neither indices nor an end")]
)
def test_data_with_indices_is_the_frameworks_to_draw(given, why):
    with pytest.raises(ConfigError, match=why):
        Entered().shard(given)


def test_a_callback_passes_on_all_options_of_join_but_those_of_the_loop():
    passed_on = JoinOptions.__annotations__.keys() - LoopOptions.__annotations__.keys()
    assert passed_on == PeerOptions.__annotations__.keys()
    assert LoopOptions.__annotations__.keys() == {"accelerator", "scheduler"}
