"""Five real processes with real daemons, one of which lies: the four others go on as members of one run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.nodes import small_terms
from tests.kit.patience import PATIENCE

ROOT = Path(__file__).parents[2]
HONEST = "import sys; from tests.faults.worker import run; run(sys.argv[1:])"
ROUNDS = 12  # after all are members


class Peer:
    """A process, and what it has said."""

    def __init__(self, folder: Path, number: int, invite: str | None, lie: str | None) -> None:
        begins = ["-c", HONEST] if lie is None else ["-m", "tests.attacks.real_liar", lie]
        given = [str(folder / "run.toml"), "--out", str(folder / str(number)), "--seed", str(number)]
        joins = [] if invite is None else ["--join", invite]
        command = [sys.executable, *begins, *given, *joins]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.digests: dict[int, str] = {}

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "it ended"
        told: dict[str, Any] = json.loads(line)
        if told["event"] == "round":
            self.digests[told["round"]] = told["digest"]
        return told

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while (told := self.hear())["event"] != "round" or not holds(told):
            pass
        return told

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.long
@pytest.mark.parametrize("lie", ["drops", "ends", "nowhere", "prepares"])
def test_four_of_five_real_peers_go_on_beside_one_that_lies(tmp_path, lie):
    terms = small_terms("sparseloco", lease=10.0, shrink_after=30.0)
    (tmp_path / "run.toml").write_text(terms.to_toml())
    peers = [Peer(tmp_path, 0, None, None)]
    try:
        invite = str(peers[0].hear()["invite"])
        peers += [Peer(tmp_path, number, invite, lie if number == 4 else None) for number in range(1, 5)]
        honest = peers[:4]
        goal = honest[0].until(lambda told: told["members"] == 5)["outer_step"] + ROUNDS
        began = time.monotonic()
        last = [peer.until(lambda told: told["outer_step"] >= goal and told["members"] >= 4) for peer in honest]
        assert time.monotonic() - began < PATIENCE
        assert min(told["outer_step"] for told in last) >= goal
        for number in set.intersection(*(set(peer.digests) for peer in honest)):
            assert len({peer.digests[number] for peer in honest}) == 1
    finally:
        for peer in peers:
            peer.end()
