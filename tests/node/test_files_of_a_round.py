"""How much of the package a reader of one round passes through: the files of it that are entered, counted.

136 where this was written, of one round of sparseloco between three peers with all that goes on beside it: consensus
23, replica 17, training 12, rounds, optimizers and compressors 10 each, wire 9, dissemination 8, tensors, swarm and
coding 6 each, transport, node and flow 5 each, parameters 3. What turns a tensor into bytes and back (compressors,
coding, wire, tensors, parameters) is 34 of them.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import decentral
from tests.lab.learners import Learner
from tests.lab.nodes import Lab, tiny_model
from tests.rounds.test_healing import settle

HOME = Path(decentral.__file__).parent
STAND_INS = (HOME / "transport" / "memory", HOME / "simulate")  # for wires and for time: no part of a real round
MOST = 154  # files: a ratchet, to be lowered; 4 look at frames, 5 save time, 2 vote, 3 are of devices, 1 adds in bands


class Entered:
    """The files of the package whose code ran, by the folder they are in."""

    def __init__(self) -> None:
        self.files: set[Path] = set()

    def __enter__(self) -> Entered:
        self.before = sys.getprofile()
        sys.setprofile(self._saw)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self.before)

    def _saw(self, frame: FrameType, event: str, arg: Any) -> None:
        path = Path(frame.f_code.co_filename) if event == "call" else None
        if path is not None and path.is_relative_to(HOME) and not any(map(path.is_relative_to, STAND_INS)):
            self.files.add(path.relative_to(HOME))

    def by_folder(self) -> dict[str, int]:
        return dict(Counter(path.parts[0] for path in self.files).most_common())


def test_one_round_of_three_peers_enters_no_more_files_than_it_did(run_lab: Any, terms: Any) -> None:
    async def script(lab: Lab) -> None:
        for _ in range(3):
            lab.add(kind=Learner)
        await settle(lab)
        for member in lab.members:
            member.idle = False
        await lab.rounds(1)  # what is compiled or cached once is so by then
        with Entered() as entered:
            await lab.rounds(1)
        assert len(entered.files) <= MOST, entered.by_folder()
        lab.check_equal()

    run_lab(terms("sparseloco"), script, make_model=tiny_model)
