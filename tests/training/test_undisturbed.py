"""Ctrl-C in the middle of what must be whole."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from decentral.training.outer_loop import GossipSteps, LoopControl, Merger
from decentral.training.processes import hold_interrupts
from decentral.training.swarm_side import run_blocking


def test_ctrl_c_is_heard_at_the_end_of_the_block() -> None:
    came_to = []

    def interrupted() -> None:
        with hold_interrupts():
            signal.raise_signal(signal.SIGINT)
            came_to.append("the end")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert came_to == ["the end"]
    with hold_interrupts():
        pass  # and not once more


def test_whoever_hears_ctrl_c_hears_it_then() -> None:
    """The command line leaves in good order at the first; a KeyboardInterrupt would end it at once."""
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with hold_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert not heard
        assert heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_commit_is_merged_whole_though_ctrl_c_comes_in_the_middle() -> None:
    """The head counted as merged and half of the model was: a checkpoint took the rest for progress backwards."""
    done = []

    def merge(update: object, model: object) -> bool:
        signal.raise_signal(signal.SIGINT)
        done.append("merged")
        return True

    merger = SimpleNamespace(
        _schedule=SimpleNamespace(merge=merge),
        _model=None,
        _parts=SimpleNamespace(take_buffers=lambda buffers: done.append("buffers")),
        _will_adopt=lambda *given: done.append("moments"),
    )
    update = SimpleNamespace(fragment=0, buffers_B=None, state={}, channels=frozenset())
    with pytest.raises(KeyboardInterrupt):
        Merger._merge(merger, update)  # type: ignore[arg-type]
    assert done == ["merged", "buffers", "moments"]


def test_a_step_of_a_pair_is_written_whole_though_ctrl_c_comes_in_the_middle() -> None:
    """Nothing was left to settle, and the last checkpoint had half of what the pair made."""
    done = []

    def swapped(*given: object, **named: object) -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("model")

    async def result(within: float | None) -> object:
        return SimpleNamespace(fragment=0, partner=None, step=0, after_N=None, unmoved=False, buffers_B=None)

    parts = SimpleNamespace(
        model=None,
        swarm=None,
        control=LoopControl(),
        schedule=SimpleNamespace(merge_swap=swapped),
        holding=nullcontext,
        looking=lambda *given, **named: nullcontext(),
        take_buffers=lambda buffers: done.append("buffers"),
    )
    steps = GossipSteps(parts, None, None)  # type: ignore[arg-type]
    steps._swap = SimpleNamespace(result=result)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        run_blocking(steps._end_swap())
    assert done == ["model", "buffers"]
    assert run_blocking(steps.settle())


def test_a_swap_that_nobody_knows_the_end_of_leaves_the_checkpoint_before() -> None:
    async def result(within: float | None) -> object:
        raise TimeoutError

    steps = GossipSteps(SimpleNamespace(model=None, swarm=None, schedule=None), None, None)  # type: ignore[arg-type]
    steps._swap = SimpleNamespace(result=result)  # type: ignore[assignment]
    assert not run_blocking(steps.settle())
