"""Real training loops on threads: what the status, the folder and the command say of a peer that learns too fast."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from decentral.cli import main
from decentral.observe.diagnostics import DEBT_RATIO, MEAN_COSINE, NEVER_SENT, NORM_DISPERSION
from tests.kit.problems import Problem, Swarm, run_terms, told


@pytest.mark.long
def test_three_peers_one_of_which_learns_too_fast_are_told_so_wherever_they_look(tmp_path: Path) -> None:
    problems = [Problem(number, lr=rate) for number, rate in enumerate((0.02, 0.02, 0.6))]
    swarm = Swarm(run_terms("sparseloco", run={"rounds": 10}), tmp_path, *problems, require_peers=0).run()
    for number, status in swarm.last.items():
        assert set(status.diagnostics) == {NORM_DISPERSION, MEAN_COSINE, DEBT_RATIO, NEVER_SENT}
        assert status.diagnosed_round == 10
        assert not status.diagnosed_part
        assert NORM_DISPERSION in status.out_of_band
        assert any("another learning rate" in one for one in status.notices)
        figures = [one["figure"] for one in told(swarm.events[number], "out_of_band")]
        assert figures.count(NORM_DISPERSION) == 1
    for name in (NORM_DISPERSION, MEAN_COSINE, NEVER_SENT):
        assert len({status.diagnostics[name] for status in swarm.last.values()}) == 1, name
    shown = CliRunner().invoke(main, ["status", "--out", str(tmp_path / "peer0"), "--prometheus"])
    assert 'decentral_peer_out_of_band{figure="norm_dispersion"} 1.0\n' in shown.stdout
