"""Peers without a daemon behind real NATs, with one relay: which get a direct connection, and which stay relayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.natlab.lab import Lab
from tests.natlab.pairs import TABLE, play
from tests.natlab.wires import Line

PAIRS = {pair.name: pair for pair in TABLE}


@pytest.mark.parametrize(("name", "path"), [("native", "punched"), ("native symmetric", "relayed")])
def test_port_preserving_nats_are_punched_with_one_relay_and_symmetric_ones_are_not(
    lab: Lab, name: str, path: str, tmp_path: Path
) -> None:
    found = play(PAIRS[name], tmp_path, Line(), patience=2.0 if path == "relayed" else 15.0, bulk=100_000)
    assert found.path == path
