"""Peers without a daemon behind real NATs, with one relay: which get a direct connection, and which stay relayed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.natlab.lab import Lab
from tests.natlab.pairs import TABLE, play
from tests.natlab.wires import Line

PAIRS = {pair.name: pair for pair in TABLE}


EXPECTED = [("native", "punched"), ("native symmetric", "relayed")]
if importlib.util.find_spec("libp2p") is not None:  # an extra
    EXPECTED.append(("py-libp2p", "punched"))
    MORE = [("py-libp2p symmetric", "relayed"), ("py-libp2p to native", "punched")]
    EXPECTED += [pytest.param(*one, marks=pytest.mark.long) for one in MORE]


@pytest.mark.parametrize(("name", "path"), EXPECTED)
def test_port_preserving_nats_are_punched_with_one_relay_and_symmetric_ones_are_not(
    lab: Lab, name: str, path: str, tmp_path: Path
) -> None:
    found = play(PAIRS[name], tmp_path, Line(), patience=2.0 if path == "relayed" else 15.0, bulk=100_000)
    assert found.path == path
