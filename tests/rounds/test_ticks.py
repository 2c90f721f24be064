"""How often a driver looks around: by its lease, and once a second at most seldom."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from decentral.rounds.peer_watch import PeerWatch

SECONDS = 20


@pytest.mark.parametrize(("lease", "looks"), [(600.0, SECONDS), (3.0, 4 * SECONDS)])
def test_a_driver_looks_who_is_here_once_a_second_however_long_leases_are(
    run_lab: Any, terms: Any, monkeypatch: pytest.MonkeyPatch, lease: float, looks: int
) -> None:
    seen: list[float] = []
    absent = PeerWatch.absent

    def counted(watch: PeerWatch, now: float) -> Any:
        seen.append(now)
        return absent(watch, now)

    async def script(lab: Any) -> None:
        lab.add()
        await anyio.sleep(5)
        monkeypatch.setattr(PeerWatch, "absent", counted)
        await anyio.sleep(SECONDS)

    run_lab(terms("sparseloco", lease=lease, shrink_after=2 * lease), script)
    assert len(seen) == pytest.approx(looks, abs=2)
