"""``decentral.join`` beside a loop of one's own, with a preset as it is shipped; the knob is H."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

import decentral
from decentral.manifest import preset_manifest
from decentral.manifest.terms import Manifest
from experiments.contestants.loop import Entered, adamw
from experiments.contestants.seat import Seat
from experiments.contestants.terms import ADAMW, BATCH_SIZE, CLIP, MODEL


def terms(seat: Seat) -> Manifest:
    """The preset, told the loop's own optimizer and H."""
    inner = {
        "steps": int(seat.match.knob),
        "learning_rate": ADAMW["lr"],
        "weight_decay": ADAMW["weight_decay"],
        "clip": CLIP,
        "warmup": 0,
    }
    run = {"name": "contest", "rounds": 100_000, "salt": "contest"}
    return preset_manifest(seat.match.contestant, run=run, model={"task": "custom"}, inner=inner)


@contextmanager
def enter(seat: Seat, model: nn.Module) -> Iterator[Entered]:
    """The first peer hands out its invite, the others join by it."""
    optimizer = adamw(model.parameters())
    peer = decentral.join(
        terms(seat) if seat.first else seat.await_text("address"),
        model,
        optimizer,
        out=seat.path(f"peer{seat.rank}"),
        listen=[f"/ip4/{seat.address}/tcp/4001"] if seat.match.mbit else None,
        tokens_per_step=BATCH_SIZE * MODEL["context"],
        lan=False,
        quiet=True,
        alone=True,
    )
    with peer:
        if seat.first:
            seat.hand_out("address", peer.invite)
        yield Entered(model, optimizer)
