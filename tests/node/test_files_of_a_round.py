"""How much of the package a reader of one round passes through: the files of it that are entered, counted.

One round of sparseloco between three peers, with all that goes on beside it. tools/house.toml has the figure.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import decentral
from tests.kit.gossip_learners import Learner
from tests.kit.nodes import Lab, scene, tiny_model
from tests.kit.partitions import settle
from tools import house

HOME = Path(decentral.__file__).parent
STAND_INS = (HOME / "transport" / "memory.py", HOME / "simulate")  # for wires and for time: no part of a real round


class Entered:
    """The files of the package whose code ran."""

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


@scene(peers=[Learner] * 3, make_model=tiny_model)
async def test_one_round_of_three_peers_enters_no_more_files_than_it_did(lab: Lab) -> None:
    await settle(lab)
    for member in lab.members:
        member.idle = False
    await lab.rounds(1)  # what is compiled or cached once is so by then
    with Entered() as entered:
        await lab.rounds(1)
    # No more, but perhaps fewer: what another test of this process has cached is not entered again.
    assert len(entered.files) <= house.figures()["files_of_a_round"], sorted(map(str, entered.files))
    lab.check_equal()
