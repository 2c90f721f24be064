"""Three real peers, one on each transport: one is killed, one comes late, and all train to the same anchors."""

from __future__ import annotations

from pathlib import Path

import pytest

from decentral.cli.demo_processes import DemoProcess, Family
from decentral.observe.events import read_events
from tests.kit.families import LISTEN, write_terms
from tests.kit.patience import PATIENCE, until

ROUNDS = 20


def anchors(peer: DemoProcess) -> dict[str, str]:
    """Of each record, the digest of the anchor after it."""
    rows = [row for row in read_events(peer.directory) if row["event"] == "commit"]
    return {str(row["record"]): str(row["anchor"]) for row in rows if row.get("anchor")}


@pytest.mark.long
def test_one_peer_on_each_transport_trains_through_a_kill_and_a_join(family: Family, tmp_path: Path) -> None:
    write_terms(tmp_path, swarm={"deadline_ceiling": 10.0, "lease": 10.0, "shrink_after": 20.0})

    def peer(name: str, *words: str, transport: str) -> DemoProcess:
        out = tmp_path / name
        told = ["--data", str(tmp_path / "text"), *LISTEN, "--transport", transport, "--out", str(out)]
        return family.start(name, out, [*words, *told])

    first = peer("first", "start", str(tmp_path / "run.toml"), transport="py-libp2p")
    invite = first.first_line(PATIENCE).split()[2]
    stays, dies = (peer(kind, "join", invite, transport=kind) for kind in ("native", "daemon"))
    until(lambda: all(len(anchors(one)) >= 3 for one in (first, stays, dies)))
    dies.kill()
    late = peer("late", "join", invite, transport="py-libp2p")
    left = (first, stays, late)
    until(lambda: len(anchors(first)) >= ROUNDS and all(len(anchors(one)) >= 5 for one in left))
    seen: dict[str, set[str]] = {}
    for one in (*left, dies):
        for record, anchor in anchors(one).items():
            seen.setdefault(record, set()).add(anchor)
    assert all(len(found) == 1 for found in seen.values())
    assert len(set(anchors(late)) & set(anchors(first)) & set(anchors(stays))) >= 3
