"""What a method does around inner steps, in a peer of one's own loop: when it is asked, and what it may change."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from decentral.errors import ConfigError
from decentral.manifest import preset_manifest
from decentral.optimizers import OuterMethod
from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.scaffold import Scaffold
from decentral.peer import Peer
from decentral.peer.joining import check_processes
from decentral.rounds.local_state import CommittedUpdate
from decentral.simulate.training import FlatModel
from decentral.training.inner_optimizers import SPSA
from decentral.training.live_model import LiveModel
from decentral.training.live_side import LiveSide, Moments
from decentral.training.schedule import SyncSchedule, memory_of, resume, stand_at, tensors_of
from tests.training.own_loops import backward, joined, loss_of, small, terms

SCAFFOLD = terms("scaffold", inner={"steps": 2})


def live_of(peer: Peer) -> LiveSide:
    return peer._part.loop.schedule.live


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters()])


def test_an_inner_step_goes_by_what_the_method_added_to_the_gradient(tmp_path):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with joined(tmp_path, model, optimizer, SCAFFOLD) as peer:
        live, turn_N = live_of(peer), torch.linspace(-1, 1, sum(p.numel() for p in model.parameters()))
        live.own(0)["turn"] = turn_N
        backward(model)
        before_N, raw_N = live.read(0), gradients(model)
        optimizer.step()
        torch.testing.assert_close(live.read(0), before_N - 0.1 * (raw_N + turn_N))
        torch.testing.assert_close(live.own(0)["sum"], raw_N)


def test_of_several_optimizers_the_method_is_asked_once_an_inner_step_before_the_first(tmp_path):
    model = small()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    with joined(tmp_path, model, [first, second], SCAFFOLD) as peer:
        backward(model)
        raw_N = gradients(model)
        for _ in range(2):  # the second of them begins no inner step
            first.step()
        second.step()
        assert float(live_of(peer).own(0)["steps"]) == 1.0
        torch.testing.assert_close(live_of(peer).own(0)["sum"], raw_N)


def test_a_closure_is_refused_where_the_method_changes_gradients_and_taken_elsewhere(tmp_path):
    for name, refused in (("scaffold", True), ("sparseloco", False)):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure(model: nn.Module = model) -> Tensor:
            backward(model)
            return loss_of(model)

        with joined(tmp_path / name, model, optimizer, terms(name, inner={"steps": 2})):
            if refused:
                with pytest.raises(ConfigError, match="was given a closure, which makes the gradients inside"):
                    optimizer.step(closure)
            else:
                optimizer.step(closure)


@pytest.mark.parametrize("unscaled", [False, True])
def test_gradients_that_a_scaler_multiplied_are_refused_until_they_are_unscaled(tmp_path, unscaled):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    with joined(tmp_path, model, optimizer, SCAFFOLD) as peer:
        scaler.scale(model(torch.ones(3, 6)).square().mean()).backward()
        if unscaled:
            scaler.unscale_(optimizer)
            raw_N = gradients(model)
            scaler.step(optimizer)
            torch.testing.assert_close(live_of(peer).own(0)["sum"], raw_N)
        else:
            with pytest.raises(ConfigError, match="still multiplied by a GradScaler"):
                scaler.step(optimizer)


def test_what_a_method_keeps_for_itself_is_in_the_checkpoint_and_in_no_snapshot(tmp_path):
    manifest, kept = SCAFFOLD.changed(run={"rounds": 1000}), []
    for rounds in (3, 0):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with joined(tmp_path, model, optimizer, manifest) as peer:
            while peer.round < rounds:
                backward(model)
                optimizer.step()
            if rounds:  # in the middle of a round
                backward(model)
                optimizer.step()
            kept.append(dict(live_of(peer).own(0)))
            assert not [name for name in peer.swarm.node.replica.shared_tensors() if "turn" in name]
    assert set(kept[0]) == set(kept[1]) == {"turn", "sum", "steps"}
    assert all(torch.equal(kept[0][name], one) for name, one in kept[1].items())


def test_a_peer_of_several_processes_is_refused_with_the_reason():
    check_processes(SCAFFOLD, 1)
    check_processes(preset_manifest("diloco"), 2)
    with pytest.raises(ConfigError, match="scaffold reads or changes the inner optimizer, which each of this peer's 2"):
        check_processes(SCAFFOLD, 2)


def test_losses_alone_are_refused_in_several_processes_which_would_go_different_ways():
    by_manifest = preset_manifest("diloco", inner={"optimizer": "spsa", "weight_decay": 0.0, "clip": None})
    told = "^spsa draws directions of its own in each of this peer's 4 processes, .* run one process"
    check_processes(by_manifest, 1)
    with pytest.raises(ConfigError, match=told):
        check_processes(by_manifest, 4)
    with pytest.raises(ConfigError, match=told):
        check_processes(preset_manifest("diloco"), 4, [SPSA(small().named_parameters())])


def test_a_method_without_hooks_is_never_asked_and_one_with_them_touches_the_training_by_that():
    class Hooked(OuterMethod):
        def after_inner_step(self, live: object, fragment: int) -> None: ...

    assert (OuterMethod.inner, DiLoCo.inner, Hooked.inner, Scaffold.inner) == (False, False, True, True)
    assert (OuterMethod.acts_before_steps, Hooked.acts_before_steps, Scaffold.acts_before_steps) == (False, False, True)
    assert (DiLoCo.on_device, Hooked.on_device, Scaffold.on_device) == (True, False, False)


class Counting(OuterMethod):
    """Notes when it is asked, and keeps a tensor."""

    asked: ClassVar[list[Any]] = []

    def after_inner_step(self, live: LiveSide, fragment: int) -> None:
        self.asked.append(("after", fragment, live.steps(fragment)))

    def progress_lost(self, live: LiveSide, fragment: int) -> None:
        self.asked.append(("lost", fragment))

    def after_commit(self, live: Any, fragment: int, state: Any, sent: Any, peers: Any) -> None:
        self.asked.append(("took", sent))


def test_progress_that_is_given_up_is_told_to_the_method_and_its_own_stays():
    model, method = FlatModel([torch.zeros(3), torch.zeros(2)]), Counting()
    method.asked.clear()
    schedule = SyncSchedule(2, 0, method, bytes(32), 2, live=LiveSide(model))
    schedule.live.own(1)["kept"] = torch.ones(2)
    schedule.stepped()
    schedule.restart(model, [torch.zeros(3), torch.zeros(2)], [1])
    assert method.asked == [("after", 0, 1), ("after", 1, 1), ("lost", 1)]
    again = SyncSchedule(2, 0, method, bytes(32), 2, live=LiveSide(model))
    stand_at(again, model, [torch.ones(3), torch.ones(2)], tensors_of(schedule))
    assert method.asked[3:] == [("lost", 0), ("lost", 1)]
    assert torch.equal(again.live.own(1)["kept"], torch.ones(2))
    assert torch.equal(model.read(0), torch.ones(3))


def test_a_commit_books_what_was_there_when_the_contribution_was_taken_and_one_in_which_nobody_counted_nothing():
    model, method, zeros = FlatModel([torch.zeros(3)]), Counting(), torch.zeros(3)
    schedule = SyncSchedule(1, 1, method, bytes(32), live=LiveSide(model))
    own = schedule.live.own(0)
    took, lost = ("took", {"kept": 1}), ("lost", 0)
    for after_N, unmoved, told in ((zeros + 1, False, took), (zeros, False, took), (zeros.clone(), True, lost)):
        schedule.stepped()
        own["kept"] = 1
        made = schedule.take(model, 0, zeros, bytes(32), 1, outer_step=0)
        own["kept"] = 2  # inner steps go on
        schedule.stepped()
        method.asked.clear()
        schedule.merge(CommittedUpdate(None, b"1" * 32, 0, zeros, after_N, made, unmoved=unmoved), model)
        assert method.asked == [told]
    schedule.merge(CommittedUpdate(None, b"1" * 32, 0, zeros, zeros + 1, None), model)  # passed by
    assert method.asked[1:] == [("took", None)]
    schedule.merge(CommittedUpdate(None, b"1" * 32, 0, zeros, zeros + 1, None, taken_N=zeros == 0), model)
    assert method.asked[2:] == [("lost", 0)]


@pytest.mark.parametrize("replayed", [False, True])
def test_commits_that_passed_a_peer_by_while_it_was_down_leave_no_gradients_of_the_old_anchor(replayed: bool):
    """SCAFFOLD's mean of them would be of another anchor than the others' means."""
    model, kept_N = FlatModel([torch.zeros(3)]), torch.zeros(3)
    schedule = SyncSchedule(4, 0, Scaffold(), bytes(32), live=LiveSide(model))
    schedule.live.own(0).update({"sum": torch.ones(3), "steps": torch.ones(1), "turn": torch.ones(3)})
    schedule.stepped()
    held, memory = {"anchor/0": kept_N, **tensors_of(schedule)}, memory_of(schedule)
    again = SyncSchedule(4, 0, Scaffold(), bytes(32), live=LiveSide(model))
    resume(again, model, held, memory, [kept_N + replayed], 1, [{"control": torch.ones(3)}])
    assert set(again.live.own(0)) == ({"turn"} if replayed else {"sum", "steps", "turn"})
    assert (again.timing.since, again.progress[0].steps) == (1, 1), "the progress itself is carried on"


def test_after_a_restart_the_method_is_told_the_shared_state_that_the_replayed_commits_left():
    model, told = FlatModel([torch.zeros(3)]), list[Any]()

    class Curious(OuterMethod):
        def after_commit(self, live: Any, fragment: int, state: Any, sent: Any, peers: Any) -> None:
            told.append((fragment, state, sent, peers))

    schedule = SyncSchedule(4, 0, Curious(), bytes(32), live=LiveSide(model))
    resume(schedule, model, {"anchor/0": torch.zeros(3)}, None, [torch.ones(3)], 1, [{"control": 7}])
    assert told == [(0, {"control": 7}, None, ())]


def test_a_gossip_step_that_could_not_be_used_gives_up_what_was_learnt_for_it():
    """It was booked as taken: what the method keeps of it was of a change that is nowhere."""
    model, method = FlatModel([torch.zeros(3)]), Counting()
    schedule = SyncSchedule(1, 0, method, bytes(32), live=LiveSide(model))
    for unmoved, told in ((False, ("took", {})), (True, ("lost", 0))):
        schedule.stepped()
        schedule.take(model, 0, torch.zeros(3), bytes(32), 1, outer_step=0)
        method.asked.clear()
        schedule.merge_swap(model, 0, torch.zeros(3), unmoved=unmoved)
        assert method.asked == [told]


def test_a_gradient_that_is_missing_reads_as_zero_and_is_made_where_something_is_added():
    model = nn.Linear(2, 1)
    optimizers = [torch.optim.SGD([model.weight], lr=0.3), torch.optim.AdamW([model.bias], lr=0.1)]
    inner = Moments(LiveModel(model, 1, None), optimizers)
    assert inner.read_gradient(0).tolist() == [0.0, 0.0, 0.0]
    inner.add_to_gradient(0, torch.tensor([1.0, 2.0, 3.0]))
    inner.add_to_gradient(0, torch.tensor([1.0, 0.0, 0.0]))
    assert inner.read_gradient(0).tolist() == [2.0, 2.0, 3.0]
    assert model.weight.grad.tolist() == [[2.0, 2.0]]


# ---- test moments ----
#
# Moments of a model of which not every parameter has one.

SIZES = (4, 3)  # values of the two parameters


class Pair(nn.Module):
    """Two vectors, of which the second is trained in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(size)) for size in SIZES)

    def backward(self, *, both: bool) -> None:
        loss = self.first.sum() + (self.second.sum() if both else 0.0)
        loss.backward()


def beside(model: Pair, *optimizers: torch.optim.Optimizer) -> Moments:
    return Moments(LiveModel(model, 1, None), optimizers)


def read(moments: Moments, name: str = "exp_avg") -> tuple[Tensor, Tensor]:
    held_N = moments.read_moment(name, 0)
    assert held_N is not None
    first_N, second_N = held_N.split(list(SIZES))
    return first_N, second_N


def test_a_parameter_that_got_no_gradient_yet_has_zeros_and_hides_nobody_elses_moment():
    model = Pair()
    adam = torch.optim.AdamW(model.parameters())
    moments = beside(model, adam)
    assert moments.read_moment("exp_avg", 0) is None
    assert not moments.write_moment("exp_avg", 0, torch.ones(7))
    model.backward(both=False)
    adam.step()
    first_N, second_N = read(moments)
    assert torch.equal(first_N, adam.state[model.first]["exp_avg"])
    assert first_N.any()
    assert torch.equal(second_N, torch.zeros(3))


def test_these_zeros_are_what_adam_keeps_of_gradients_that_are_zero():
    found = []
    for both in (False, True):
        model = Pair()
        adam = torch.optim.AdamW(model.parameters())
        model.backward(both=False)
        if both:
            model.second.grad = torch.zeros_like(model.second)
        adam.step()
        found.append([*read(beside(model, adam)), *read(beside(model, adam), "exp_avg_sq")])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_mean_is_written_where_there_is_a_moment_and_makes_none():
    model = Pair()
    adam = torch.optim.AdamW(model.parameters())
    model.backward(both=False)
    adam.step()
    moments = beside(model, adam)
    assert moments.write_moment("exp_avg", 0, torch.full((7,), 0.5))
    assert torch.equal(adam.state[model.first]["exp_avg"], torch.full((4,), 0.5))
    assert not adam.state.get(model.second)
    model.backward(both=True)
    adam.step()  # which makes its state of nothing
    assert all(one.any() for one in read(moments))


def test_a_parameter_whose_optimizer_keeps_no_such_moment_has_zeros():
    model = Pair()
    adam, sgd = torch.optim.AdamW([model.first]), torch.optim.SGD([model.second], momentum=0.9)
    model.backward(both=True)
    adam.step()
    sgd.step()
    moments = beside(model, adam, sgd)
    first_N, second_N = read(moments)
    assert first_N.any()
    assert not second_N.any()
    assert moments.write_moment("exp_avg", 0, torch.ones(7))
    assert set(sgd.state[model.second]) == {"momentum_buffer"}


def test_while_another_optimizer_has_not_made_its_first_step_there_is_nothing_to_share_or_to_adopt():
    model = Pair()
    first, second = torch.optim.AdamW([model.first]), torch.optim.AdamW([model.second])
    model.backward(both=True)
    first.step()
    moments = beside(model, first, second)
    assert moments.read_moment("exp_avg", 0) is None
    assert not moments.write_moment("exp_avg", 0, torch.ones(7))
    second.step()
    assert all(one.any() for one in read(moments))
