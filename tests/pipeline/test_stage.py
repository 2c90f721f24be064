"""Stages of a replica against the whole of it, bit for bit."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decentral.errors import ConfigError
from decentral.parameters import schema_of
from decentral.pipeline.stage import Done, Stage, segments_of
from decentral.pipeline.turns import Turn
from decentral.tasks.language_model import LanguageModel, build_language_model
from decentral.tasks.sizing import LanguageModelConfig
from decentral.training.swarm_side import run_blocking
from tests.kit.patience import PATIENCE

MICRO, WINDOWS, LENGTH = 5, 2, 8
CONFIG = {"hidden": 16, "layers": 4, "heads": 2, "context": LENGTH, "tie_embeddings": False}


class Queues:
    """The neighbours of one stage of this process: what one puts, the other takes."""

    def __init__(self, place: int, stages: int, ways: dict[Any, queue.Queue[Any]], news: threading.Condition) -> None:
        self._place, self._stages, self._ways, self._news = place, stages, ways, news
        self._draw = random.Random(place)

    def _put(self, kind: str, to: int, what: Any) -> None:
        with self._news:
            self._ways[kind, self._place, to].put(what)
            self._news.notify_all()

    def _take(self, kind: str, of: int) -> Any:
        return self._ways[kind, of, self._place].get(timeout=PATIENCE)

    async def first_here(self, turns: Sequence[Turn]) -> Turn:
        def here() -> list[Turn]:
            return [turn for turn in turns if self._is_here(turn)]

        with self._news:
            assert self._news.wait_for(here, PATIENCE)
            return self._draw.choice(here())  # in whichever order things come, the bits are the same

    def _is_here(self, turn: Turn) -> bool:
        if turn.forward:
            return not self._place or not self._ways["states", self._place - 1, self._place].empty()
        is_last = self._place == self._stages - 1
        return is_last or not self._ways["gradient", self._place + 1, self._place].empty()

    async def send_on(self, micro: int, states: Tensor) -> None:
        self._put("states", self._place + 1, states.clone())

    async def send_back(self, micro: int, gradient: Tensor) -> None:
        self._put("gradient", self._place - 1, gradient.clone())

    async def send_targets(self, micro: int, targets: Tensor) -> None:
        self._put("targets", self._stages - 1, targets)

    async def receive_states(self, micro: int) -> Tensor:
        return self._take("states", self._place - 1)

    async def receive_gradient(self, micro: int) -> Tensor:
        return self._take("gradient", self._place + 1)

    async def receive_targets(self, micro: int) -> Tensor:
        return self._take("targets", 0)

    async def exchange(self, done: Done) -> list[Done]:
        others = [other for other in range(self._stages) if other != self._place]
        for other in others:
            self._put("done", other, done.to_bytes())
        told = {self._place: done, **{other: Done.read(self._take("done", other)) for other in others}}
        return [told[place] for place in range(self._stages)]


def model() -> LanguageModel:
    return build_language_model(LanguageModelConfig(**CONFIG), seed=3)


def batches(steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(0, 256, (steps, MICRO, WINDOWS, LENGTH), generator=generator)
    return [list(step) for step in drawn]


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))


class Forgetful(Silent):
    def segments(self) -> list[tuple[nn.Module, list[nn.Module]]]:
        return [(layer, [layer]) for layer in self.layers[:3]]


def optimizer_of(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def train_whole(steps: list[list[Tensor]], clip: float | None) -> tuple[LanguageModel, list[float]]:
    whole, losses = model(), list[float]()
    optimizer = optimizer_of(list(whole.parameters()))
    for step in steps:
        total = 0.0
        for micro in step:
            loss = whole(micro, labels=micro).loss
            (loss / len(step)).backward()
            total += loss.item()
        if clip is not None:
            nn.utils.clip_grad_norm_(whole.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / len(step))
    return whole, losses


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Stages are threads already, and those of torch wait for one another on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train_in_stages(
    steps: list[list[Tensor]], clip: float | None, parts: Sequence[range]
) -> tuple[list[LanguageModel], list[list[float]]]:
    stages, ways = len(parts), {}
    ways |= {
        (kind, one, other): queue.Queue()
        for kind in ("states", "gradient", "targets", "done")
        for one in range(stages)
        for other in range(stages)
    }
    models, losses, news = [model() for _ in parts], [list[float]() for _ in parts], threading.Condition()

    def run(place: int) -> None:
        mine = models[place]
        fragments = schema_of(mine, 4, layout="stages").fragments
        segments = segments_of(mine, fragments)
        held = [one for fragment in parts[place] for one in segments[fragment]]
        stage = Stage(held, place, stages)
        optimizer = optimizer_of(stage.parameters)
        lines = Queues(place, stages, ways, news)
        for step in steps:
            losses[place].append(run_blocking(stage.step(lines, step, step, mine.loss, clip)))
            optimizer.step()
            optimizer.zero_grad()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return models, losses


@pytest.mark.parametrize(
    "parts",
    [[range(2), range(2, 4)], [range(1), range(1, 3), range(3, 4)], [range(n, n + 1) for n in range(4)]],
    ids=[2, 3, 4],
)
@pytest.mark.parametrize("clip", [None, 0.5], ids=["free", "clipped"])
def test_stages_are_the_whole_model_bit_for_bit_after_a_hundred_steps(parts: list[range], clip: float | None) -> None:
    steps = batches(100)
    whole, losses = train_whole(steps, clip)
    models, told = train_in_stages(steps, clip, parts)
    assert all(one == losses for one in told), "every stage knows the loss"
    fragments = schema_of(whole, 4, layout="stages").fragments
    for part, one in zip(parts, models, strict=True):
        mine, theirs = dict(one.named_parameters()), dict(whole.named_parameters())
        for fragment in part:
            assert all(torch.equal(mine[name], theirs[name]) for name in fragments[fragment].names)


def test_a_model_is_cut_where_its_fragments_end() -> None:
    made = model()
    found = segments_of(made, schema_of(made, 4, layout="stages").fragments)
    assert sum(map(len, found)) == CONFIG["layers"] + 2, "blocks, an embedding and a head"
    tokens = batches(1)[0][0]
    states = tokens
    for segment in (one for fragment in found for one in fragment):
        states = segment.run(states)
    assert torch.equal(states, made(tokens).logits)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Silent, "nobody knows where a Silent"),
        (lambda: build_language_model(LanguageModelConfig(**{**CONFIG, "tie_embeddings": True}), seed=0), "tied"),
        (Forgetful, "layers.3.weight is in none"),
    ],
    ids=["no segments", "tied", "too few"],
)
def test_a_model_that_cannot_be_cut_is_refused_with_a_reason(make: Any, why: str) -> None:
    made = make()
    with pytest.raises(ConfigError, match=why):
        segments_of(made, schema_of(made, 4, layout="stages").fragments)
