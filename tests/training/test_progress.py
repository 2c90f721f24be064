"""A boundary holds training for one pass over the live model, and comes to the bits of copies read and written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from decentral.errors import NonFiniteError
from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.streaming import StreamingDiLoCo
from decentral.rounds.local_state import CommittedUpdate
from decentral.training.live_model import LiveModel
from decentral.training.schedule import SyncSchedule
from tests.training.scenes import record

SIZE = 3 * 40 + 40 + 40 * 2 + 2


class Copies(LiveModel):
    """The same, of which only copies are to be had."""

    def in_place(self, fragment: int) -> None:
        return None


def model(kind: type[LiveModel]) -> LiveModel:
    module = nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 2))
    made = kind(module, 1, None)
    made.write(0, torch.randn(SIZE, generator=torch.Generator().manual_seed(7)))
    return made


def learn(live: LiveModel, seed: int) -> None:
    """An inner step, in some of the places."""
    moved_N = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * 1e-2
    moved_N[:: 3 + seed % 2] = 0.0
    at = 0
    for parameter in live.trained.values():
        parameter.data.sub_(moved_N[at : at + parameter.numel()].view(parameter.shape))
        at += parameter.numel()


def course(live: LiveModel, method: DiLoCo, overlap: int, passed_by: Sequence[int] = ()) -> list[Tensor]:
    """Live model and contributions over eight rounds of four steps each."""
    pace = SyncSchedule(interval=4, overlap=overlap, method=method, seen=bytes(32))
    generator, seen, offered = torch.Generator().manual_seed(1), list[Tensor](), None
    anchor_N = live.read(0)
    for number in range(8 * 4):
        learn(live, number)
        pace.stepped()
        if offered is not None and pace.timing.since - (pace.timing.sent_at or 0) >= overlap:
            after_N = anchor_N - torch.randn(SIZE, generator=generator) * 1e-2
            mine = None if number // 4 in passed_by else offered
            pace.merge(CommittedUpdate(record(), bytes([number]) * 32, 0, anchor_N, after_N, mine), live)
            anchor_N, offered = after_N, None
            seen.append(live.read(0))
        if pace.timing.due:
            offered = pace.take(live, 0, anchor_N, pace.seen, 1, outer_step=number // 4)
            if offered is None:  # too much passed it by
                pace.restart(live, [anchor_N], [0])
                continue
            seen += [offered.gradient_N, offered.local_N, torch.tensor(pace.progress[0].norms[-1])]
    return seen


@pytest.mark.parametrize("overlap", [0, 2, 4])
@pytest.mark.parametrize("passed_by", [(), (3,)])
@pytest.mark.parametrize("method", [DiLoCo(), StreamingDiLoCo(alpha=0.5)], ids=str)
def test_a_model_changed_where_it_lies_and_one_that_is_read_and_written_stay_equal(overlap, passed_by, method):
    quick, slow = (course(model(kind), method, overlap, passed_by) for kind in (LiveModel, Copies))
    assert len(quick) == len(slow) > 20
    for left, right in zip(quick, slow, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12 if left.dim() == 0 else 0, atol=0)


class Memory(TorchDispatchMode):
    """The pieces of memory as long as the model, or longer, that tensors lie in while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.met: dict[int, Tensor] = {}  # by address: what is kept cannot be given out again

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        for one in (*args, made):
            if isinstance(one, Tensor) and one.untyped_storage().nbytes() >= 4 * SIZE:
                self.met.setdefault(one.untyped_storage().data_ptr(), one)
        return made

    def new(self, *known: Tensor) -> int:
        """How many of them are none of these."""
        return len(self.met.keys() - {one.untyped_storage().data_ptr() for one in known})


@pytest.mark.parametrize(("kind", "merging", "taking"), [(LiveModel, 1, 0), (Copies, 2, 2)])
def test_with_overlap_a_merge_and_a_contribution_take_one_vector_as_long_as_the_model(kind, merging, taking):
    live, before_N, after_N = model(kind), torch.zeros(SIZE), torch.ones(SIZE)
    pace = SyncSchedule(interval=1, overlap=1, method=DiLoCo(), seen=bytes(32))
    learn(live, 0)
    pace.stepped()
    mine = pace.take(live, 0, before_N, pace.seen, 1, outer_step=0)
    assert mine is not None
    learn(live, 1)
    pace.stepped()
    update = CommittedUpdate(record(), b"1" * 32, 0, before_N, after_N, mine)
    with Memory() as merged:
        pace.merge(update, live)
    known = (before_N, after_N, mine.local_N, mine.gradient_N)
    assert merged.new(*known) == merging
    with Memory() as taken:
        pace.take(live, 0, after_N, pace.seen, 1, outer_step=1)
    assert taken.new(*known, *merged.met.values()) == taking


def test_what_is_written_between_a_merge_and_a_contribution_is_in_the_contribution():
    live, zeros = model(LiveModel), torch.zeros(SIZE)
    pace = SyncSchedule(interval=1, overlap=1, method=DiLoCo(), seen=bytes(32))
    pace.stepped()
    pace.merge(CommittedUpdate(record(), b"1" * 32, 0, zeros, zeros, None), live)
    live.write(0, torch.full((SIZE,), 2.0))
    made = pace.take(live, 0, zeros, pace.seen, 1, outer_step=1)
    assert made is not None
    assert torch.equal(made.gradient_N, torch.full((SIZE,), -2.0))


@pytest.mark.parametrize("overlap", [0, 1])
def test_nan_in_a_live_model_is_named_when_the_contribution_is_taken(overlap):
    live, zeros = model(LiveModel), torch.zeros(SIZE)
    pace = SyncSchedule(interval=1, overlap=overlap, method=DiLoCo(), seen=bytes(32))
    with torch.no_grad():
        live.trained["1.weight"][1, 3] = math.nan
    pace.stepped()
    made = pace.take(live, 0, zeros, pace.seen, 1, outer_step=0)
    assert made is not None
    assert not made.is_finite

    with pytest.raises(NonFiniteError, match=r"1\.weight"):
        made.check_finite(SimpleNamespace(schema=live.schema))


def test_a_model_that_has_float32_by_now_forgets_the_rounding_of_one_that_had_less():
    live, zeros = model(LiveModel), torch.zeros(SIZE)
    pace = SyncSchedule(interval=1, overlap=1, method=DiLoCo(), seen=bytes(32))
    pace.progress[0].rounding_N = torch.ones(SIZE)  # as a checkpoint recalls it
    pace.stepped()
    pace.merge(CommittedUpdate(record(), b"1" * 32, 0, zeros, zeros, None), live)
    assert pace.progress[0].rounding_N is None
