"""A Trainer with a DecentralCallback: joins, stops, saves, resumes, logs; alone over a network in memory."""

from __future__ import annotations

import copy
import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch.utils.data import IterableDataset
from transformers import TrainerCallback

import decentral
from decentral.errors import ConfigError
from decentral.integrations.transformers import DecentralCallback
from decentral.manifest import Manifest
from decentral.parameters import schema_of
from decentral.parameters.model import gather
from decentral.state.checkpoint import load_newest
from tests.integrations import tiny
from tests.integrations.tiny import NET, Tokens, Watched, run_ranks, terms


def alone(out: Path, manifest: Manifest | None, **given: Any) -> DecentralCallback:
    """A callback whose peer nobody joins."""
    return DecentralCallback(manifest, **tiny.alone(out), **given)


class Seen(TrainerCallback):
    """What a tracker that the Trainer put first would be told."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        self.logs.append(dict(logs or {}))


class AtStep(TrainerCallback):
    """Does something after a step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.act()


def test_training_stops_with_the_run_and_the_model_is_its_anchor(tmp_path, tiny_gpt2, make_trainer):
    callback = alone(tmp_path / "run", terms())
    anchors: list[torch.Tensor] = []
    trainer = make_trainer(tiny_gpt2, callback, AtStep(12, lambda: anchors.extend(callback.peer.anchor())))
    trainer.train()
    assert trainer.state.global_step == 12
    assert callback.peer is None
    (fragment,) = schema_of(tiny_gpt2, 1).fragments
    assert torch.equal(gather(dict(tiny_gpt2.named_parameters()), fragment), anchors[0])


def test_the_swarms_numbers_are_in_the_logs_also_of_trackers_that_come_first(tmp_path, tiny_gpt2, make_trainer):
    tracker, callback = Seen(), alone(tmp_path / "run", terms())
    trainer = make_trainer(tiny_gpt2, tracker, callback)
    trainer.train()
    rounds = [one["swarm/round"] for one in tracker.logs if "loss" in one]
    assert rounds == [0, 1, 2, 2, 3, 4]
    assert all(one["swarm/members"] == 1 for one in trainer.state.log_history)
    assert tracker.logs[-1]["swarm/inner_steps"] == 12


def test_a_trainer_that_is_shorter_than_the_run_says_so_at_its_beginning(tmp_path, tiny_gpt2, make_trainer, caplog):
    make_trainer(tiny_gpt2, alone(tmp_path / "run", terms(rounds=4)), max_steps=5).train()
    warnings = [record.getMessage() for record in caplog.records if record.name == "decentral"]
    assert "the Trainer ends after 5 more steps, and the run's 4 more rounds take about 12" in warnings[0]


def test_a_trainers_schedule_begins_where_the_run_is(tmp_path, tiny_gpt2, make_trainer, caplog):
    model, schedules = copy.deepcopy(tiny_gpt2), list[Any]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    with decentral.join(terms(), model, optimizer, out=tmp_path / "a", alone=True, **NET) as peer:
        for _ in range(6):
            model(**{name: one[None] for name, one in Tokens(1, 0)[0].items()}).loss.backward()
            optimizer.step()
        callback = DecentralCallback(peer.invite, out=tmp_path / "b", **NET)
        leaves = AtStep(1, lambda: (schedules.append(trainer.lr_scheduler.last_epoch), callback.peer.leave()))
        trainer = make_trainer(tiny_gpt2, callback, leaves, max_steps=10, lr_scheduler_type="linear")
        trainer.train()
    assert schedules == [7], "six of the run and one of its own"
    assert any("LambdaLR goes on from step 6 instead of 0, at a rate of 0.004" in one for one in caplog.messages)
    assert any("stretched over max_steps = 10" in one and "has 12 steps" in one for one in caplog.messages)


def test_a_trainer_draws_streamed_data_that_is_shared_out(tmp_path, tiny_gpt2, make_trainer):
    callback, drawn = alone(tmp_path / "run", terms()), list[int]()

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            rows = Tokens(64, 0)
            yield from (rows[drawn.append(number) or number % 64] for number in range(10**6))

    trainer = make_trainer(tiny_gpt2, callback)
    trainer.train_dataset = callback.shard(Stream())
    trainer.train()
    assert trainer.state.global_step == 12
    assert drawn[:48] == list(range(48))


def test_the_best_model_of_the_past_is_not_taken_for_what_was_trained(tmp_path, tiny_gpt2, make_trainer):
    chosen = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 5}
    chosen |= {"load_best_model_at_end": True, "greater_is_better": True}  # the worst, that is: the first
    trained: list[torch.Tensor] = []
    weight = tiny_gpt2.transformer.wte.weight
    at_end = AtStep(5, lambda: trained.append(weight.detach().clone()))
    make_trainer(tiny_gpt2, alone(tmp_path / "run", terms(steps=10)), at_end, **chosen).train()
    assert not torch.equal(weight, trained[0])
    kept = load_newest(tmp_path / "run" / "checkpoints")
    assert kept.meta["inner_steps"] == 5
    assert torch.equal(kept.tensors["live/0"][: weight.numel()], trained[0].flatten())


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "decentral.integrations.transformers")
    with pytest.raises(ConfigError, match=r"pip install 'transformers>="):
        importlib.import_module("decentral.integrations.transformers")


def test_a_model_that_is_sharded_over_processes_is_refused(tmp_path, tiny_gpt2, make_trainer, monkeypatch):
    trainer = make_trainer(tiny_gpt2, alone(tmp_path / "run", terms()))
    sharded = SimpleNamespace(distributed_type=DistributedType.FSDP)
    monkeypatch.setattr("decentral.integrations.callbacks.AcceleratorState", lambda: sharded)
    with pytest.raises(ConfigError, match="FSDP shards the model over this peer's processes, and a round needs all"):
        trainer.train()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_accumulated_gradients_are_one_inner_step(tmp_path, tiny_gpt2, make_trainer):
    trainer = make_trainer(tiny_gpt2, alone(tmp_path / "run", terms(rounds=2)), gradient_accumulation_steps=3)
    trainer.train()
    assert trainer.state.global_step == 6


def test_each_peer_draws_the_same_data_in_an_order_of_its_own(tmp_path, tiny_gpt2, make_trainer):
    def drawn(name: str, times: int) -> list[list[int]]:
        orders = []
        for _ in range(times):
            trainer = make_trainer(tiny_gpt2, alone(tmp_path / name, terms(rounds=100)), max_steps=4)
            order: list[int] = []
            trainer.train_dataset = Watched(trainer.train_dataset, order)
            trainer.train()
            orders.append(order)
        return orders

    (one, again), (other,) = drawn("a", 2), drawn("b", 1)
    assert one == again != other
    assert len(set(one)) == len(one)


@pytest.mark.long
def test_what_a_checkpoint_restores_takes_part_as_before(tmp_path, make_trainer, tiny_gpt2):
    chosen = {"save_strategy": "steps", "save_steps": 5}
    first = DecentralCallback(terms(), out=tmp_path / "run", **NET, alone=True)
    make_trainer(tiny_gpt2, first, AtStep(4, lambda: first.peer.leave()), **chosen).train()
    again = make_trainer(tiny_gpt2, DecentralCallback(None, **NET, alone=True), **chosen)
    again.args.restore_callback_states_from_checkpoint = True
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 12
    assert again.state.log_history[-1]["swarm/round"] == 4


def test_a_preset_founds_the_run_and_a_checkpoint_leads_back_to_its_folder(tmp_path, tiny_gpt2, make_trainer):
    callback = alone(tmp_path / "run", None, preset="diloco", rounds=2, steps=3)
    trainer = make_trainer(tiny_gpt2, callback)
    trainer.train()
    assert trainer.state.global_step == 6
    args = callback.state()["args"]
    assert (args["run"], args.keys() & {"preset", "rounds", "steps"}) == (str(tmp_path / "run" / "run.toml"), set())


def test_somebody_asks_the_peer_to_leave_and_training_stops(tmp_path, tiny_gpt2, make_trainer):
    callback = alone(tmp_path / "run", terms(rounds=100))
    trainer = make_trainer(tiny_gpt2, callback, AtStep(5, lambda: callback.peer.leave()))
    trainer.train()
    assert trainer.state.global_step == 6


def test_a_trainer_resumes_where_its_peer_and_its_data_were(tmp_path, make_trainer, tiny_gpt2):
    def run(model: torch.nn.Module, callback: DecentralCallback, resume: str | None, stop: int) -> Any:
        chosen = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps", "eval_steps": 5}
        chosen |= {"lr_scheduler_type": "linear", "warmup_steps": 4, "max_steps": 12}
        trainer = make_trainer(model, callback, AtStep(stop, lambda: callback.peer.leave()), **chosen)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    begin = {name: value.clone() for name, value in tiny_gpt2.state_dict().items()}
    first = run(tiny_gpt2, alone(tmp_path / "whole", terms()), None, stop=99)
    whole = {name: value.clone() for name, value in first.model.state_dict().items()}
    tiny_gpt2.load_state_dict(begin)
    (tmp_path / "run").mkdir()
    shutil.copy(tmp_path / "whole/identity.key", tmp_path / "run")  # the same order of the data
    run(tiny_gpt2, alone(tmp_path / "run", terms()), None, stop=4)  # leaves at 5, after the checkpoints of both
    checkpoint = tmp_path / "trainer" / "checkpoint-5"
    kept = json.loads((checkpoint / "trainer_state.json").read_text())["stateful_callbacks"]["DecentralCallback"]
    assert kept["args"]["run"] == str(tmp_path / "run" / "run.toml")
    assert kept["attributes"]["kept"]["inner_steps"] == 5
    resumed = run(tiny_gpt2, alone(tmp_path / "run", terms()), str(checkpoint), stop=99)
    assert resumed.state.global_step == 12
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, whole[name]), name


def test_a_checkpoint_whose_peer_is_not_in_the_folder_is_refused(tmp_path, make_trainer, tiny_gpt2):
    callback = alone(tmp_path / "run", terms())
    chosen = {"save_strategy": "steps", "save_steps": 5}
    make_trainer(tiny_gpt2, callback, AtStep(4, lambda: callback.peer.leave()), **chosen).train()
    elsewhere = make_trainer(tiny_gpt2, alone(tmp_path / "elsewhere", terms()), **chosen)
    with pytest.raises(
        ConfigError, match=r"after round 1 of this run, and .*elsewhere holds no checkpoint of the peer"
    ):
        elsewhere.train(resume_from_checkpoint=True)
    assert not (tmp_path / "elsewhere" / "checkpoints").exists()


def test_the_state_makes_the_callback_again_and_holds_no_token(tmp_path):
    callback = DecentralCallback(
        "decentral1:secret", out=tmp_path, admit="twelve-letters", tokens_per_step=48, observer=print, alone=True
    )
    state = json.loads(json.dumps(callback.state()))
    assert state["args"] == {"run": None, "out": str(tmp_path), "tokens_per_step": 48, "alone": True}
    assert DecentralCallback.from_state(state).state() == callback.state()


def test_a_keyword_that_join_has_not_is_refused_at_once():
    with pytest.raises(TypeError, match=r"has no argument max_uplaod; did you mean max_upload\?"):
        DecentralCallback("run.toml", max_uplaod="5mbit", alone=True)


def test_a_trainer_that_fails_ends_its_peer_with_the_block_around_it(tmp_path, tiny_gpt2, make_trainer):
    def fail() -> None:
        raise ValueError("no more data")

    with pytest.raises(ValueError, match="no more data"), alone(tmp_path / "run", terms()) as callback:
        make_trainer(tiny_gpt2, callback, AtStep(4, fail)).train()
    assert callback.peer is None
    assert not tiny_gpt2.lm_head.weight._backward_hooks


@pytest.mark.long
def test_a_trainer_of_two_processes_is_one_peer(tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    found = run_ranks(tmp_path, *launch, "-m", "tests.integrations.trainer_ranks")
    one, other = found["ranks"]
    assert one == other
    assert one[::2] == [12, 2]
    assert sorted(item for part in found["first_pass"] for item in part) == list(range(64))
    assert found["logs"][-1]["swarm/inner_steps"] == 12
