"""The training loop of every contestant: paced steps, one line of JSON for each, weights put aside for later.

A step lasts ``pace`` seconds before anything is sent, like on a small GPU that nobody else uses: the gradient is really
computed, the rest is waited for. Held-out loss is taken after the match, from the weights: it costs no time here.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from decentral.tasks.batches import batch_at
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import LanguageModelConfig
from experiments.contestants.seat import Seat
from experiments.contestants.terms import ADAMW, BATCH_SIZE, CLIP, MODEL, data_key

PICTURES = 8  # of the weights, over a match, beside the last


@dataclass(frozen=True, slots=True)
class Entered:
    """A contestant that has met the others. ``Any``: hivemind's optimizer is untyped."""

    model: nn.Module  # to be called
    optimizer: Any
    sends_in_backward: bool = False


class Contestant(Protocol):
    """What is compared: everything between one peer's loop and the others'."""

    def __call__(self, seat: Seat, model: nn.Module) -> AbstractContextManager[Entered]: ...


def fresh_model(seed: int) -> nn.Module:
    """The same bits for every peer of every contestant."""
    return build_language_model(LanguageModelConfig(**MODEL), seed=seed)


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.AdamW:
    """The inner optimizer of all."""
    return torch.optim.AdamW(parameters, **ADAMW)


class Loop:
    """One peer's part of a match."""

    def __init__(self, seat: Seat, entered: Entered, model: nn.Module, train: Tensor, out: TextIO) -> None:
        self.seat, self.entered, self.model, self.train, self.out = seat, entered, model, train, out
        self.pace, self.sent_before = seat.match.pace, sent(seat.interface)
        self.step, self.pictured, self.nobody = 0, 0, threading.Event()

    def run(self, began: float) -> None:
        """Until the match is over; ``began`` by the machine's monotonic clock."""
        over = began + self.seat.match.seconds
        while (now := time.monotonic()) < over:
            self._picture_if_due((now - began) / self.seat.match.seconds * PICTURES, now - began)
            try:
                loss, computed = self._one_step()
            except RuntimeError:
                if time.monotonic() < over:
                    raise
                break  # somebody else's match was over a moment before, in the middle of this step
            self._say(
                at=time.monotonic() - began,
                step=self.step,
                loss=loss,
                computed=computed,
                seconds=time.monotonic() - now,
                sent=sent(self.seat.interface) - self.sent_before,
            )
        self._picture(time.monotonic() - began)

    def _one_step(self) -> tuple[float, float]:
        """The loss, and the seconds until the gradient was there, before any waiting."""
        began, matrix = time.monotonic(), self._batch()
        loss = self.entered.model(**matrix).loss
        if self.entered.sends_in_backward:  # so the waiting comes before: a backward pass takes two forward passes
            computed = 3 * (time.monotonic() - began)
            self._rest(computed)
            loss.backward()
        else:
            loss.backward()
            computed = time.monotonic() - began
            self._rest(computed)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.entered.optimizer.step()
        self.entered.optimizer.zero_grad()
        self.step += 1
        return float(loss.detach()), computed

    def _rest(self, computed: float) -> None:
        self.nobody.wait(max(0.0, self.pace - computed))

    def _batch(self) -> dict[str, Tensor]:
        return batch_at(
            self.train,
            seed=self.seat.match.seed,
            peer=data_key(self.seat.rank),
            step=self.step,
            batch_size=BATCH_SIZE,
            context=MODEL["context"],
        )

    def _picture_if_due(self, place: float, at: float) -> None:
        if place >= self.pictured:
            self.pictured = int(place) + 1
            self._picture(at)

    def _picture(self, at: float) -> None:
        name = f"weights-{self.seat.rank}-{self.step}.safetensors"
        weights = {key: value.detach() for key, value in self.model.named_parameters()}
        save_file(weights, self.seat.path(name))
        self._say(at=at, step=self.step, weights=name, sent=sent(self.seat.interface) - self.sent_before)

    def _say(self, **record: Any) -> None:  # Any: JSON
        self.out.write(json.dumps(record) + "\n")
        self.out.flush()


def sent(interface: str) -> int:
    """Bytes that left by this interface of this process's network, headers included: the one meter for all.

    /sys would show the network in which it was mounted, not the one that a process has entered.
    """
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    found = next(line for line in lines if line.strip().startswith(f"{interface}:"))
    return int(found.split(":")[1].split()[8])
