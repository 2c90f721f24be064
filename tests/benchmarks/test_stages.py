"""The table of stages: rounds that agree, and parts that are no more than the whole."""

from __future__ import annotations

import json

import torch
from click.testing import CliRunner

from decentral.benchmarks.exchange import Case
from decentral.benchmarks.stages import STAGES, StagedPeer, Stopwatch
from decentral.cli import main

ROWS = 16 * 256  # a block of a language model, and its embedding


def test_each_round_moves_the_model_to_the_mean_of_what_all_learnt():
    case = Case(kind="gather", rows=ROWS, many=True, ups=(1.0,) * 3, downs=(1.0,) * 3)
    peer = StagedPeer(case)
    before_N = peer.replica.anchors[0]
    peer.hold_round(Stopwatch())
    moved_N = sum(peer.learnt_N.roll(number) for number in range(3)) / 3
    torch.testing.assert_close(before_N - peer.replica.anchors[0], moved_N)
    assert torch.equal(peer.model.read(0), peer.replica.anchors[0])
    assert peer.head.outer_step == 1
    assert len(peer.model.trained) == 11


def test_every_stage_is_timed_for_one_tensor_and_for_many():
    words = ["bench", "stages", "--peers", "2", "--megabytes", "16", "--rounds", "1", "--json"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    found = {row["stage"]: row for row in json.loads(result.stdout)}
    assert list(found) == [*dict(STAGES), "all"]
    assert all(row["one_ms"] >= 0 and row["many_ms"] >= 0 for row in found.values())
    assert found["all"]["one_ms"] >= max(row["one_ms"] for row in found.values())
    assert found["all"]["tensors"] == 11
