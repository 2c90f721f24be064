"""Torch's global switches, as scripts set them, change no bit of a contribution, a frame, an anchor or a state."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decentral.compressors import Compressor
from decentral.optimizers import OuterMethod
from decentral.wire import body
from tests.kit.learners import Learners, codec_of, held
from tests.kit.replicas import NUMEL
from tests.kit.switches import SWITCHES

pytestmark = pytest.mark.one_of_each
SHAPES = ((), (0,), (1,), (7, 5), (130, 67))
MAKE_OTHERS = (
    "float64",
    "another device",
)  # of what tensors are made that do not say it; the others change what is done
few_and_all = pytest.mark.parametrize(
    "switches",
    [MAKE_OTHERS, pytest.param(tuple(set(SWITCHES) - set(MAKE_OTHERS)), marks=pytest.mark.long)],
    ids=["made", "done"],
)


def forget_tables() -> None:
    """A table that was made before the switch would hide one that is made by it."""
    for name, module in list(sys.modules.items()):
        for one in vars(module).values() if name.startswith("decentral.compressors.") else ():
            if hasattr(one, "cache_clear"):
                one.cache_clear()


def gaussian(numel: int, seed: int) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=drawn, dtype=torch.float32, device="cpu")


def under(switch: str, work: Callable[[], list[bytes]]) -> list[bytes]:
    forget_tables()
    try:
        with SWITCHES[switch]():
            return work()
    finally:
        forget_tables()


def bits(one: Tensor) -> bytes:
    return one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if one.numel() else b""


@few_and_all
def test_a_compressor_gives_the_same_bytes_and_values_under_every_switch(
    compressor: Compressor, switches: tuple[str, ...]
):
    def work() -> list[bytes]:
        found = []
        for shape in SHAPES:
            data = body.encode(compressor, [compressor.compress_one(gaussian(math.prod(shape), 1).reshape(shape))])
            (arrived,) = body.decode(compressor, data, [shape])
            back = compressor.decompress_one(arrived)
            assert back.dtype == torch.float32
            found += [bytes(data), bits(back)]
        return found

    plain = work()
    assert {switch: under(switch, work) == plain for switch in switches} == dict.fromkeys(switches, True)


@few_and_all
def test_rounds_of_a_method_end_at_the_same_bits_under_every_switch(outer: OuterMethod, switches: tuple[str, ...]):
    def work() -> list[bytes]:
        run = Learners(outer, 2, gaussian(NUMEL, 0), codec_of(outer))
        for number in range(3):
            run.learn({n: 0.01 * gaussian(NUMEL, 10 * number + n) for n in (0, 1)})
            run.meet((0, 1))
        found = [bits(peer.live_N) for peer in run.peers]
        for peer in run.peers:
            kept = {**held(peer), **peer.schedule.live.tensors()}
            assert {one.dtype for one in kept.values()} <= {torch.float32, torch.uint8, torch.int64}
            found += [bits(one) for _, one in sorted(kept.items())]
        return found

    plain = work()
    assert {switch: under(switch, work) == plain for switch in switches} == dict.fromkeys(switches, True)
