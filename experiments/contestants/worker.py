"""One peer of a match, a process of its own: python -m experiments.contestants.worker SEAT, as JSON.

Meets the others, says so in the match's folder, trains from the go to the end, writes steps-RANK.jsonl, and is gone.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback

import torch

from decentral.tasks.corpus import load_corpus
from experiments.contestants.loop import Loop, fresh_model
from experiments.contestants.seat import Seat

MODULES = {
    "sparseloco": "ours",
    "diloco": "ours",
    "hivemind": "hivemind_local",
    "ddp": "ddp",
    "torchft": "torchft_diloco",
}


def play(seat: Seat) -> None:
    """The match, as this peer has it."""
    torch.set_num_threads(1)
    train, model = load_corpus().train, fresh_model(seat.match.seed)
    contestant = importlib.import_module(f"experiments.contestants.{MODULES[seat.match.contestant]}")
    seat.hand_out(f"asks-{seat.rank}", str(time.monotonic()))  # what came before is Python's imports
    with seat.path(f"steps-{seat.rank}.jsonl").open("w") as out, contestant.enter(seat, model) as entered:
        seat.hand_out(f"ready-{seat.rank}", "")
        Loop(seat, entered, model, train, out).run(float(seat.await_text("go")))
        seat.hand_out(f"done-{seat.rank}", "")
        out.flush()
        os._exit(0)  # how long each takes to close is not compared


def main() -> None:
    """See above."""
    seat = Seat.of_line(sys.argv[1])
    try:
        play(seat)
    except BaseException as error:  # noqa: BLE001  whatever ends it is its result
        traceback.print_exc()
        seat.hand_out(f"failed-{seat.rank}", f"{type(error).__name__}: {error}".splitlines()[0][:300])
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
