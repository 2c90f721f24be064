"""Minutes of a swarm whose rounds fail at 50 Mbit/s: what a leak of the kind users met would show in that time.

They met 16 GB in three hours, which is 90 MB a minute (hivemind#264). ``python -m tests.soak.run`` runs for longer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.natlab.namespaces import why_impossible
from tests.soak.run import Soak
from tests.soak.swarm import SoakSwarm, Terms

MB = 2.0**20
SETTLED = 15  # rounds after which all that a round needs has been taken once
SECONDS = 210.0  # from then on
MADE = 5  # rounds meanwhile, at least: a machine of its own makes ten times as many


@pytest.mark.long
def test_memory_and_descriptors_stay_flat_while_rounds_fail_at_50_mbit(tmp_path: Path) -> None:
    if why := why_impossible():
        pytest.skip(why)
    with SoakSwarm(tmp_path, Terms(rounds=10_000, mbit=50.0, hidden=64)) as swarm:
        found = Soak(swarm, cut_every=30.0, kill_every=45.0).run(SECONDS, SETTLED)
    assert found.cuts >= 3
    assert found.kills >= 2
    assert found.rounds[-1][1] >= SETTLED + MADE, "it has to make rounds, too"
    begin = next(at for at, made in found.rounds if made >= SETTLED)
    for series, most in ((found.memory, 45 * MB), (found.daemon, 30 * MB), (found.fds, 20), (found.threads, 10)):
        lived = max(series.values(), key=len)
        settled = [value for at, value in lived if at >= begin]
        half = len(settled) // 2
        grown = max(settled[half:]) - max(settled[:half])
        assert grown < most, f"{grown} more in the second half than in the first, of {settled}"
