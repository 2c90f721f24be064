"""Real training loops on threads: what the status, the folder and the command say of a peer that learns too fast."""

from __future__ import annotations

import threading
from pathlib import Path

from click.testing import CliRunner

from decentral.cli import main
from decentral.observe.events import read_events
from decentral.observe.status import Status
from decentral.peer import join
from decentral.replica.figures import DEBT_RATIO, MEAN_COSINE, NEVER_SENT, NORM_DISPERSION
from tests.kit.problems import LOOPBACK, Problem, run_terms, run_together

RATES = (0.02, 0.02, 0.6)


class Trio:
    """A founder and two that it invites."""

    def __init__(self, folder: Path) -> None:
        self.manifest, self.folder = run_terms("sparseloco", run={"rounds": 10}), folder
        self.invited, self.invite = threading.Event(), ""
        self.last: dict[int, Status] = {}

    def peer(self, number: int) -> None:
        assert not number or self.invited.wait(60)
        problem = Problem(number, lr=RATES[number])
        given = {"listen": LOOPBACK, "transport": "native", "lan": False, "quiet": True, "require_peers": 0}
        out = self.folder / f"peer{number}"
        with join(self.invite or self.manifest, problem.model, problem.optimizer, out=out, **given, alone=True) as peer:
            if not number:
                self.invite = peer.invite
                self.invited.set()
            waited = threading.Event()
            while len(peer.status().members) < len(RATES):
                waited.wait(0.05)
            while not peer.done:
                problem.step()
            self.last[number] = peer.status()


def test_three_peers_one_of_which_learns_too_fast_are_told_so_wherever_they_look(tmp_path: Path) -> None:
    trio = Trio(tmp_path)
    run_together(*(lambda n=n: trio.peer(n) for n in range(len(RATES))))
    for number, status in trio.last.items():
        assert set(status.diagnostics) == {NORM_DISPERSION, MEAN_COSINE, DEBT_RATIO, NEVER_SENT}
        assert status.diagnosed_round == 10
        assert not status.diagnosed_part
        assert NORM_DISPERSION in status.out_of_band
        assert any("another learning rate" in one for one in status.notices)
        told = list(read_events(tmp_path / f"peer{number}", event="out_of_band"))
        assert [one["figure"] for one in told].count(NORM_DISPERSION) == 1
    for name in (NORM_DISPERSION, MEAN_COSINE, NEVER_SENT):
        assert len({status.diagnostics[name] for status in trio.last.values()}) == 1, name
    shown = CliRunner().invoke(main, ["status", "--out", str(tmp_path / "peer0"), "--prometheus"])
    assert 'decentral_peer_out_of_band{figure="norm_dispersion"} 1.0\n' in shown.stdout
