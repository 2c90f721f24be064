"""Checkpoints: whole or passed over, whatever the disk does; and what a state is made of."""

import copy
import errno
import itertools
import json
import os
import random
import resource
import shutil
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file

from decentral.errors import ConfigError, DiskError
from decentral.simulate.disk import crash_states
from decentral.state import checkpoint
from decentral.state.checkpoint import (
    META,
    TENSORS,
    fill_in,
    flatten,
    load_newest,
    random_state,
    save,
    set_random_state,
    storable,
    unflatten,
)
from tests.kit.disks import FailingDisk, recording_disk


def tensors_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        "anchor/0": torch.randn(5, generator=generator),
        "half": torch.randn(2, 2, generator=generator).bfloat16(),
        "step": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
    }


def same(left, right):
    return left.keys() == right.keys() and all(
        left[k].dtype == right[k].dtype and torch.equal(left[k], right[k]) for k in left
    )


def rounds_in(directory):
    found = load_newest(directory)
    return None if found is None else found.meta["round"]


def refusal_of(action):
    try:
        action()
    except DiskError as error:
        return str(error)
    return None


@pytest.fixture
def two_checkpoints(tmp_path):
    for number in (1, 2):
        save(tmp_path / "checkpoints", f"round-{number}", tensors_of(number), {"round": number})
    return tmp_path / "checkpoints"


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path):
    """Its tensors as safetensors reads them, too, its document as a person does."""
    assert load_newest(tmp_path / "c") is None
    meta = {"round": 7, "lr": 0.1, "nested": [{"a": None}, "ü", -0.0, 2**60]}
    path = save(tmp_path / "c", "round-7", tensors_of(7), meta)
    found = load_newest(tmp_path / "c")
    assert same(found.tensors, tensors_of(7))
    assert (found.meta, found.path, found.passed_over) == (meta, path, ())
    assert same(load_file(path / TENSORS), tensors_of(7))
    stored = json.loads((path / META).read_text())["document"]
    assert stored["meta"] == meta
    assert set(stored["hashes"]) == {"", "anchor/0", "half", "step", "empty"}


def test_tensors_that_share_memory_or_are_not_contiguous_are_stored(tmp_path):
    row = torch.arange(6.0)
    save(tmp_path, "views", {"a": row[:4], "b": row[2:], "c": row.view(2, 3).T}, {})
    found = load_newest(tmp_path).tensors
    assert same(found, {"a": row[:4], "b": row[2:], "c": row.view(2, 3).T})
    found["a"][0] = 99  # a copy of its own, not a map of the file
    assert load_newest(tmp_path).tensors["a"][0] == 0


def test_the_last_three_are_kept(tmp_path):
    for number in range(5):
        save(tmp_path, f"round-{number}", tensors_of(number), {"round": number})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00000002-round-2",
        "00000003-round-3",
        "00000004-round-4",
    ]


def test_what_a_crash_left_half_written_is_swept_away(two_checkpoints):
    shutil.copytree(load_newest(two_checkpoints).path, two_checkpoints / ".tmp-00000002-round-3")
    assert rounds_in(two_checkpoints) == 2
    save(two_checkpoints, "round-3", tensors_of(3), {"round": 3})
    assert not list(two_checkpoints.glob(".tmp-*"))


@pytest.mark.parametrize("name", [TENSORS, META])
def test_every_truncation_is_passed_over_for_the_next_valid_one(two_checkpoints, name):
    file = load_newest(two_checkpoints).path / name
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        found = load_newest(two_checkpoints)
        assert found.meta["round"] == 1, f"{length} of {len(whole)} bytes were taken for a checkpoint"
        ((passed, reason),) = found.passed_over
        assert passed == "00000001-round-2"
        assert name in reason


@pytest.mark.parametrize("name", [TENSORS, META])
@pytest.mark.parametrize("flip", [0x01, pytest.param(0x80, marks=pytest.mark.long)])
def test_every_flipped_byte_is_passed_over_for_the_next_valid_one(two_checkpoints, name, flip):
    file = load_newest(two_checkpoints).path / name
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
        assert rounds_in(two_checkpoints) == 1, f"flipping byte {place} by {flip:#x} went unseen"


@pytest.mark.parametrize("name", [TENSORS, META])
def test_a_file_with_more_at_its_end_of_another_checkpoint_or_missing_is_passed_over(two_checkpoints, name):
    """What is wrong within a document is in tests/corpus."""
    older, newer = sorted(two_checkpoints.iterdir())
    whole = (newer / name).read_bytes()
    for data in (whole + b"\0", whole + b"\n", whole + b"x" * 1000, (older / name).read_bytes()):
        (newer / name).write_bytes(data)
        assert rounds_in(two_checkpoints) == 1
    (newer / name).unlink()
    assert rounds_in(two_checkpoints) == 1
    (newer / name).mkdir()
    assert rounds_in(two_checkpoints) == 1


def test_checkpoints_that_a_peer_replaces_while_they_are_read_are_not_called_damaged(two_checkpoints, monkeypatch):
    """A large one takes longer to read than a quick run takes to write three others."""
    read, moved = checkpoint.read_checkpoint, list[Path]()

    def read_while_others_are_written(folder: Path, *rest: object) -> object:
        if len(moved) < 2:
            moved.append(folder)
            folder.rename(folder.with_name(f"{folder.name}-later"))
        return read(folder, *rest)

    monkeypatch.setattr(checkpoint, "read_checkpoint", read_while_others_are_written)
    found = load_newest(two_checkpoints)
    assert len(moved) == 2
    assert found is not None
    assert found.meta["round"] == 2


def test_when_all_are_damaged_one_line_says_what_to_do(two_checkpoints):
    for folder in two_checkpoints.iterdir():
        (folder / META).write_text("{}")
    with pytest.raises(DiskError, match=r"all 2 checkpoints in .* are damaged .*restore one from a copy") as caught:
        load_newest(two_checkpoints)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meta"),
    [("", {}), ("../up", {}), (".hidden", {}), ("a", {"x": float("nan")}), ("a", {"x": b"bytes"})],
)
def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path, name, meta):
    with pytest.raises(ConfigError):
        save(tmp_path / "c", name, {}, meta)
    assert not (tmp_path / "c").exists()


def test_no_crash_leaves_a_torn_checkpoint_or_loses_a_finished_one(tmp_path):
    disk = recording_disk(tmp_path / "disk")
    finished = [0]
    for number in range(1, 6):  # the last two also drop an old one
        save(disk.root / "checkpoints", f"round-{number}", tensors_of(number), {"round": number}, disk)
        finished.append(len(disk.log))
    left, seen = recording_disk(tmp_path / "left"), set()
    for state in crash_states(disk.log, limit=32, cuts=4):
        left.become(state.tree)
        safe = sum(state.done >= mark for mark in finished) - 1
        found = load_newest(left.root / "checkpoints")
        number = 0 if found is None else found.meta["round"]
        assert number in (safe, safe + 1), f"after operation {state.done}: round {number}"
        assert found is None or (same(found.tensors, tensors_of(number)) and not found.passed_over)
        seen.add(number)
    assert seen == {0, 1, 2, 3, 4, 5}


def test_the_same_enumeration_catches_a_writer_without_fsync(tmp_path):
    disk = recording_disk(tmp_path / "disk")
    save(disk.root / "checkpoints", "round-1", tensors_of(1), {"round": 1}, disk)
    log = [operation for operation in disk.log if not operation.call.startswith("sync")]
    left, torn, lost = recording_disk(tmp_path / "left"), 0, 0
    for state in crash_states(log):
        left.become(state.tree)
        try:
            lost += load_newest(left.root / "checkpoints") is None and state.done == len(log)
        except DiskError:
            torn += 1
    assert torn
    assert lost


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_whichever_operation_the_disk_refuses_the_state_is_as_before(two_checkpoints, error):
    for first in itertools.count(1):
        disk = FailingDisk(two_checkpoints.parent, first, error)
        refusal = refusal_of(lambda d=disk: save(two_checkpoints, "round-3", tensors_of(3), {"round": 3}, d))
        if refusal is None:
            break
        assert os.strerror(error) in refusal
        assert "\n" not in refusal
        assert rounds_in(two_checkpoints) == 2
        assert len(list(two_checkpoints.iterdir())) == 2
    assert disk.count < first, "every operation of a save was refused once"
    assert first > 8
    assert rounds_in(two_checkpoints) == 3


def test_a_file_size_limit_of_the_system_is_one_line_and_changes_nothing(two_checkpoints):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(DiskError, match=r"writing checkpoint big .*free space or fix the permissions"):
            save(two_checkpoints, "big", {"x": torch.zeros(2**19)}, {"round": 3})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert rounds_in(two_checkpoints) == 2
    assert not list(two_checkpoints.glob(".tmp-*"))


def test_a_directory_that_cannot_be_made_is_a_disk_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DiskError, match="writing checkpoint a to"):
        save(tmp_path / "file" / "checkpoints", "a", {}, {})


def equal(left, right):
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, numpy.ndarray):
        return left.dtype == right.dtype and numpy.array_equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(equal(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        pairs = zip(left, right, strict=False)
        return type(left) is type(right) and len(left) == len(right) and all(equal(a, b) for a, b in pairs)
    return type(left) is type(right) and (left == right or left != left)


def through_json(tree):
    tensors, document = flatten(tree, "x")
    return unflatten(json.loads(json.dumps(document, allow_nan=False)), tensors)


def make(optimizer_class, **options):
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(4, 3)
    options = copy.deepcopy(options)  # a learning rate that is a tensor is changed in place
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    optimizer = optimizer_class(model.parameters(), **options)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


def train(model, optimizer, schedule, steps):
    for step in steps:
        data = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        model(data).square().sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "amsgrad": True}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
        (torch.optim.RMSprop, {"lr": 1e-3, "centered": True}),
        (torch.optim.Adagrad, {"lr": 1e-2}),
    ],
)
def test_resumed_training_takes_the_same_steps_bit_for_bit(tmp_path, optimizer_class, options):
    straight, resumed = make(optimizer_class, **options), make(optimizer_class, **options)
    train(*straight, range(10))
    train(*resumed, range(6))
    state = [part.state_dict() for part in resumed]
    tensors, document = flatten(state, "inner")
    save(tmp_path, "round-1", tensors, document)

    model, optimizer, schedule = make(optimizer_class, **options)
    found = load_newest(tmp_path)
    for part, stored in zip((model, optimizer, schedule), unflatten(found.meta, found.tensors), strict=True):
        part.load_state_dict(stored)
    train(model, optimizer, schedule, range(6, 10))
    for one, other in zip(straight[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert equal(straight[1].state_dict(), optimizer.state_dict())
    assert equal(straight[2].state_dict(), schedule.state_dict())


SCHEDULES = [
    lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
]


@pytest.mark.parametrize("make_schedule", SCHEDULES)
def test_every_kind_of_schedule_resumes(make_schedule):
    def start():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        return optimizer, make_schedule(optimizer)

    def step(optimizer, schedule, count):
        rates = []
        for _ in range(count):
            optimizer.step()
            schedule.step()
            rates.append(schedule.get_last_lr())
        return rates

    straight, resumed = start(), start()
    step(*straight, 3)
    for part, source in zip(resumed, straight, strict=True):
        part.load_state_dict(through_json(source.state_dict()))
    assert step(*straight, 5) == step(*resumed, 5)


class Warm(torch.optim.lr_scheduler.LRScheduler):
    """As the gradual warm-up of ildoonet: another schedule is among its values."""

    def __init__(self, optimizer, after):
        self.after = after
        super().__init__(optimizer)

    def get_lr(self):
        return self.after.get_last_lr()

    def step(self, epoch=None):
        if self.last_epoch >= 0:
            self.after.step()
        super().step(epoch)


def test_what_a_script_makes_anew_is_left_out_of_a_state_and_found_where_it_was():
    def start(lr):
        groups = {"filter": lambda p: p.ndim == 1, "dtype": torch.float32, "many": [len, 1]}
        optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], **groups}], lr=lr, momentum=0.9)
        return optimizer, Warm(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))

    straight, resumed = start(0.1), start(0.1)
    for _ in range(3):
        straight[0].step()
        straight[1].step()
    made = dict(resumed[0].param_groups[0]), resumed[1].after
    for part, source in zip(resumed, straight, strict=True):
        part.load_state_dict(fill_in(through_json(storable(source.state_dict())), part.state_dict()))
    group = resumed[0].param_groups[0]
    assert all(group[name] == made[0][name] for name in ("filter", "dtype", "many"))
    assert group["lr"] == straight[0].param_groups[0]["lr"]
    assert resumed[1].after is made[1]
    assert made[1].optimizer is resumed[0]
    assert made[1].last_epoch == straight[1].after.last_epoch == 3


@pytest.mark.parametrize("make_schedule", SCHEDULES)
def test_a_state_of_values_alone_is_stored_as_it_is(make_schedule):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    for part in (optimizer, make_schedule(optimizer)):
        state = part.state_dict()
        assert equal(storable(state), state)
        assert equal(fill_in(state, part.state_dict()), state)


@pytest.mark.parametrize(
    "tree",
    [
        {0: "integer key", "0": "text key", (1, 2): "tuple key", None: 1, True: 2},
        [float("inf"), -float("inf"), float("nan"), -0.0, 5e-324, 0.1],
        (1, [2, (3,)], {"a": ()}),
        {"tensor": {"float": ["the words of the format"]}},
        torch.tensor(3.5, dtype=torch.float64),
        {"a": torch.arange(3, dtype=torch.uint8), "b": numpy.arange(3, dtype=numpy.uint32)},
        2**70,
    ],
)
def test_every_kind_of_value_survives_json(tree):
    assert equal(through_json(tree), tree)
    assert through_json({"lr": numpy.float64(0.5)}) == {"lr": 0.5}, "a scalar of numpy becomes a plain number"


def test_flatten_copies_so_training_may_go_on():
    live = torch.zeros(3)
    tensors, document = flatten({"exp_avg": live}, "x")
    live += 1
    restored = unflatten(document, tensors)["exp_avg"]
    assert torch.equal(restored, torch.zeros(3))
    restored += 1
    assert torch.equal(tensors["x/0"], torch.zeros(3))


def test_a_value_without_a_plain_form_is_named_by_its_place():
    with pytest.raises(ConfigError, match=r"inner\['groups'\]\[1\] is a object: only numbers"):
        flatten({"groups": [1, object()]}, "inner")
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="nested deeper"):
        flatten(loop, "inner")


def test_the_random_generators_go_on_where_they_were():
    before = random_state()
    try:
        state = through_json(random_state())
        drawn = [torch.rand(3).tolist(), random.random(), numpy.random.rand()]
        set_random_state(state)
        assert [torch.rand(3).tolist(), random.random(), numpy.random.rand()] == drawn
    finally:
        set_random_state(before)
