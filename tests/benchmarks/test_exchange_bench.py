"""The exchange benchmark with real peers, small: what it says can be trusted."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from decentral.cli import main
from decentral.flow.pacing import BURST


@pytest.mark.long
@pytest.mark.parametrize("kind", ["reduce", "gather", "pair"])
def test_two_peers_exchange_equal_replicas_no_faster_than_their_links(kind):
    words = ["bench", "exchange", "--peers", "2", "--kind", kind, "--megabytes", "1", "--rounds", "1", "--json"]
    result = CliRunner().invoke(main, [*words, "--up", "20mbit", "--transport", "native"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["equal"]
    assert found["all_contributed"]
    saved_up = 2 * BURST  # before each of the two phases of a reduce
    assert sum(step["seconds"] for step in found["steps"]) > found["bound_seconds"] - saved_up, "the caps hold"
    (step,) = found["steps"]
    assert step["sent"] < 1.1 * step["nbytes"], "a body each, and little else"
