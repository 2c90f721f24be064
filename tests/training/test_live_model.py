"""The model at a boundary: what is frozen and moved is found without hashing it, buffers may become something else."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from decentral.errors import ConfigError
from decentral.parameters import copy_tensors, frozen_digest
from decentral.training import joined
from decentral.training.joined import LOOKED_AT
from decentral.training.live_model import LiveModel

MOVED = "is frozen, so that all peers have the same, but changed after the join"


class Taught(nn.Module):
    """A student, a frozen teacher of its shape, and a frozen table."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.student, self.teacher = (nn.Linear(12, 12, bias=bias, dtype=dtype) for _ in range(2))
        self.table = nn.Parameter(torch.randn(400, 8, dtype=dtype))
        self.teacher.requires_grad_(False)
        self.table.requires_grad_(False)


def looked_at_twice(model: nn.Module, change: Callable[[], object]) -> None:
    live = LiveModel(model, 1, None)
    live.check_trained()
    with torch.no_grad():
        change()
    live.check_trained()


CHANGES: dict[str, tuple[str, Callable[[Taught], object]]] = {
    "an EMA": ("teacher", lambda m: m.teacher.weight.lerp_(m.student.weight, 1e-3)),
    "an EMA by data": ("teacher", lambda m: m.teacher.weight.data.mul_(0.999).add_(m.student.weight.data, alpha=1e-3)),
    "a hard copy": ("teacher", lambda m: m.teacher.load_state_dict(m.student.state_dict())),
    "another module": ("teacher", lambda m: setattr(m, "teacher", nn.Linear(12, 12))),
    "other data": ("teacher", lambda m: setattr(m.teacher.weight, "data", torch.zeros(12, 12))),
    "of another shape": ("teacher", lambda m: setattr(m.teacher.weight, "data", torch.zeros(13, 12))),
    "a few rows": ("table", lambda m: m.table[7:9].add_(1.0)),
    "all rows by data": ("table", lambda m: m.table.data.mul_(0.99)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_frozen_parameter_that_the_loop_moves_is_named_with_the_way_out(name: str):
    model = Taught()
    around, change = CHANGES[name]
    with pytest.raises(ConfigError, match=rf"^{around}.*{MOVED}.*join\(\.\.\., moved=\[\"{around}\"\]\)"):
        looked_at_twice(model, lambda: change(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_merged_into_a_frozen_tensor_and_taken_out_again_is_rounding(dtype: torch.dtype):
    model, deltas = Taught(dtype), torch.Generator().manual_seed(0)

    def merges() -> None:
        for _ in range(50):
            delta = 0.1 * torch.randn(12, 12, generator=deltas).to(dtype)
            model.teacher.weight.data += delta
            model.teacher.weight.data -= delta

    before = model.teacher.weight.clone()
    looked_at_twice(model, merges)
    assert not torch.equal(model.teacher.weight, before)


def test_what_is_written_anew_with_the_same_values_is_hashed_once(monkeypatch):
    model, hashed = Taught(), []

    def counted(tensor: Tensor) -> str:
        hashed.append(tensor)
        return frozen_digest(tensor)

    monkeypatch.setattr(joined, "frozen_digest", counted)
    live = LiveModel(model, 1, None)
    for _ in range(5):
        live.check_trained()
        model.load_state_dict(model.state_dict())
    assert len(hashed) == 2  # the teacher's matrix and the table: of its bias every value is looked at


def test_of_many_frozen_tensors_each_is_looked_at_in_its_turn():
    many = 3 * LOOKED_AT
    model = nn.Module()
    model.base = nn.ParameterList(nn.Parameter(torch.ones(4), requires_grad=False) for _ in range(many))
    model.up = nn.Parameter(torch.ones(3))
    live = LiveModel(model, 1, None)
    model.base[-1].data += 1.0
    for _ in range(2):
        live.check_trained()
    with pytest.raises(ConfigError, match=rf"^base\.{many - 1} {MOVED}"):
        live.check_trained()


def test_a_teacher_that_is_thrown_away_or_only_thawed_is_no_change():
    model = Taught()
    looked_at_twice(model, lambda: model.table.requires_grad_(True))
    looked_at_twice(Taught(), lambda: delattr(model, "teacher"))


def test_a_base_under_adapters_is_peft_s_to_merge():
    model = nn.Module()
    model.base_layer = nn.Linear(6, 6)
    holder = nn.Module()
    holder.proj, holder.up = model, nn.Parameter(torch.ones(3))
    model.base_layer.requires_grad_(False)
    looked_at_twice(holder, lambda: model.base_layer.weight.add_(1.0))


# ---- what is named as moved ----


def test_what_is_named_goes_the_way_of_buffers_whether_it_is_frozen_or_not():
    model = Taught()
    model.teacher.requires_grad_(True)
    model.teacher.register_buffer("seen", torch.zeros(2))
    live = LiveModel(model, 1, None, moved=["teacher", "table"])
    assert [spec.name for spec in live.schema.buffers] == ["table", "teacher.weight", "teacher.bias", "teacher.seen"]
    assert not live.schema.frozen
    assert sorted(live.trained) == ["student.bias", "student.weight"]
    values_B = torch.arange(float(live.schema.buffer_numel))
    live.write_buffers(values_B)
    assert torch.equal(model.teacher.bias.detach(), values_B[-14:-2])
    model.teacher = nn.Linear(12, 12)  # a copy put in its place, without what else was in it
    live.write_buffers(values_B)
    assert torch.equal(model.teacher.bias.detach(), values_B[-14:-2])
    live.check_trained()


def target_beside(model: nn.Module, *, frozen: bool) -> nn.ModuleDict:
    return nn.ModuleDict({"model": model, "target": copy.deepcopy(model).requires_grad_(not frozen)})


@pytest.mark.parametrize("frozen", [False, True])
def test_a_copy_of_what_is_trained_goes_the_way_of_buffers_unnamed_and_that_is_said(caplog, frozen):
    both = target_beside(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)), frozen=frozen)
    optimizer = torch.optim.SGD(both["model"].parameters(), lr=0.1)
    live = LiveModel(both, 1, None, [optimizer])
    assert {name for name in live.trained if not name.startswith("model.")} == set()
    assert not live.schema.frozen
    assert len([spec for spec in live.schema.buffers if spec.name.startswith("target.")]) == 6 + 3
    live.joined.warn_of_copies()
    (record,) = caplog.records
    assert record.getMessage().startswith("target begins as a copy of what is trained")
    assert LiveModel(both, 1, None, [optimizer], moved=[]).schema.buffers[0].name == "model.1.running_mean"


NO_COPIES: dict[str, Callable[[], nn.Module]] = {
    "a stack of equal blocks, of which some are frozen": lambda: nn.Sequential(
        *(copy.deepcopy(block).requires_grad_(number > 0) for block in [nn.Linear(4, 4)] for number in range(3))
    ),
    "other values": lambda: nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4).requires_grad_(False)}),
    "constants": lambda: nn.ModuleDict({"a": nn.LayerNorm(4), "b": nn.LayerNorm(4).requires_grad_(False)}),
    "nothing": lambda: nn.ModuleDict(
        {"a": nn.ParameterList([torch.empty(0, 3)]), "b": nn.ParameterList([torch.empty(0, 3)]).requires_grad_(False)}
    ),
    "another shape": lambda: nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 5).requires_grad_(False)}),
}


@pytest.mark.parametrize("what", NO_COPIES)
def test_what_only_looks_like_a_copy_stays_frozen(what):
    model = NO_COPIES[what]()
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert copy_tensors(model, trained) == {}


def test_copies_that_would_fill_the_line_have_to_be_named(monkeypatch):
    monkeypatch.setattr(joined, "MOST_COPIED", 19)
    both = target_beside(nn.Linear(4, 4), frozen=True)
    assert len(LiveModel(both, 1, None).schema.frozen) == 2
    assert len(LiveModel(both, 1, None, moved=["target"]).schema.buffers) == 2


def test_a_name_that_nothing_has_is_refused_with_those_that_there_are():
    with pytest.raises(
        ConfigError, match=r"join\(moved=\['techer'\]\): no parameter .* begin with table, student, teac"
    ):
        LiveModel(Taught(), 1, None, moved=["techer"])


# ---- buffers that become something else ----


class Lists(nn.Module):
    """Buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("seen", torch.ones(3))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.masked = nn.Module()
        self.masked.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("num_batches_tracked", torch.tensor(5))


NEW_B = torch.tensor([2.0, 2.0, 7.0, 7.0, 7.0, 8.0, 9.0, 0.0, 1.0])


def pieces(model: Lists) -> list[list[float]]:
    return [buffer.flatten().tolist() for buffer in model.buffers()]


def test_whole_numbers_but_counters_are_a_peers_own_and_a_newcomer_begins_with_the_runs(caplog):
    model = Lists()
    live = LiveModel(model, 1, None)
    for _ in range(2):
        live.write_buffers(NEW_B)
    assert pieces(model) == [[2.0, 2.0], [7.0, 7.0, 7.0], [0], [9], [True, False]]
    (record,) = caplog.records
    assert record.getMessage().startswith("masked.mask, pointer: whole numbers, of which a mean is nothing")
    live.buffers.write(NEW_B, whole=True)
    assert pieces(model)[2:] == [[8], [9], [False, True]]


@pytest.mark.parametrize("policy", ["first", "own"])
def test_by_the_other_policies_they_are_as_the_manifest_says(caplog, policy):
    model = Lists()
    LiveModel(model, 1, None, buffers=policy).write_buffers(NEW_B)
    assert pieces(model)[2:] == [[8], [9], [False, True]]
    assert caplog.records == []


BECOMES: dict[str, Callable[[Lists], object]] = {
    "grows": lambda m: setattr(m, "seen", torch.ones(5)),
    "is resized in place": lambda m: m.seen.resize_(7),
    "becomes whole": lambda m: setattr(m, "seen", torch.ones(3, dtype=torch.int)),
    "goes": lambda m: delattr(m, "seen"),
    "is None": lambda m: setattr(m, "seen", None),
}


@pytest.mark.parametrize("what", BECOMES)
def test_a_buffer_that_becomes_something_else_is_told_once_and_stays_a_peers_own(caplog, what):
    model = Lists()
    live = LiveModel(model, 1, None)
    before_B = live.read_buffers()
    BECOMES[what](model)
    now = None if "seen" not in model._buffers or model.seen is None else model.seen.clone()
    assert torch.equal(live.read_buffers(), before_B)  # others get what it was
    live.buffers.write(NEW_B, whole=True)
    assert torch.equal(live.read_buffers()[2:5], NEW_B[2:5])
    assert torch.equal(model.mean, NEW_B[:2])
    assert not model.masked.mask[0]
    assert not model.pointer  # it may be of that list
    assert now is None or torch.equal(model.seen, now)
    (record,) = caplog.records
    assert record.getMessage().startswith("the buffer seen was (3,) of floats at the join and is ")
    kept = live.buffers.copies()
    again = Lists()
    LiveModel(again, 1, None).buffers.restore(kept)
    assert torch.equal(again.seen, torch.ones(3) if now is None else now)
    assert torch.equal(again.mean, NEW_B[:2])


def test_a_buffer_that_was_registered_later_is_kept_and_comes_back_where_it_is():
    model = Lists()
    live = LiveModel(model, 1, None)
    model.register_buffer("late", torch.ones(4))
    kept, again = live.buffers.copies(), Lists()
    other = LiveModel(again, 1, None)
    other.buffers.restore(kept)
    again.register_buffer("late", torch.zeros(1))
    other.buffers.restore(kept)
    assert torch.equal(again.late, torch.ones(4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_low_rank_change_that_is_merged_and_taken_out_by_hand_is_no_change(dtype: torch.dtype):
    torch.manual_seed(0)
    base, head = nn.Linear(256, 256, dtype=dtype).requires_grad_(False), nn.Linear(4, 4)
    live = LiveModel(nn.ModuleDict({"base": base, "head": head}), 1, None)
    merged = (torch.randn(256, 4) @ torch.randn(4, 256) * 1e-6).to(dtype)
    with torch.no_grad():
        base.weight.add_(merged).sub_(merged)
    live.check_trained()
    with torch.no_grad():
        base.weight[1, 1:5] += 1.0  # which no sample has
    live.joined._frozen[0].hashed = False
    with pytest.raises(ConfigError, match=r"base.weight is frozen"):
        live.check_trained()
