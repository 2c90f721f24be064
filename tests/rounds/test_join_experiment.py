"""The figures of a join can be made again: the script that measures it runs, both ways, in virtual time."""

import re
import sys

import pytest

measure = pytest.importorskip("experiments.catchup.measure", reason="not part of a source distribution")


@pytest.fixture
def joined(monkeypatch, capsys):
    def run(*words):
        small = ["join", "--numel", "250000", "--step", "2", "--uplinks", "4", "--downlink", "4", "--latency", "0.01"]
        monkeypatch.setattr(sys, "argv", ["measure.py", *small, *words])
        with monkeypatch.context() as patches:  # what it sets for its process
            patches.setattr(measure.scheduler, "_ALLOW_DETERMINISTIC_SCHEDULING", False)
            patches.setattr(measure.scheduler, "_r", measure.scheduler._r)
            measure.main()
        seconds, share = re.findall(r": ([\d.]+) s, .*received ([\d.]+) x size", capsys.readouterr().out)[0]
        return float(seconds), float(share)

    return run


def test_packed_chunks_bring_a_newcomer_in_sooner_by_what_they_save(joined):
    seconds, share = joined()
    plain_seconds, plain_share = joined("--as-they-are")
    assert plain_share > 1.0 > 0.86 > share
    assert seconds < 0.92 * plain_seconds
