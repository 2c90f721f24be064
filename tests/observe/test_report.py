import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from decentral.errors import DiskError
from decentral.observe.report import (
    Curve,
    DemoSummary,
    dense_allreduce_nbytes,
    draw_figure,
    print_table,
    write_summary,
)

PROMISED_KEYS = [
    *("algorithm", "peers", "rounds", "inner_steps", "seconds", "loss_first", "loss_last", "loss_solo"),
    *("eval_bits_per_byte", "bytes_sent", "bytes_received", "bytes_dense_fp32_every_step", "reduction"),
    *("anchor_digests", "killed", "joined", "stray_processes"),
]

SUMMARY = DemoSummary(
    algorithm="sparseloco",
    peers=4,
    rounds=12,
    inner_steps=360,
    seconds=170.5,
    loss_first=5.54,
    loss_last=1.5,
    loss_solo=1.8,
    eval_bits_per_byte=2.16,
    bytes_sent=4_000_000,
    bytes_received=4_000_100,
    bytes_dense_fp32_every_step=8_000_000_000,
    reduction=2000.0,
    anchor_digests={"peer-0": "ab" * 32, "peer-1": "ab" * 32},
    killed=1,
    joined=1,
    stray_processes=0,
)


def test_the_summary_has_exactly_the_promised_keys(tmp_path: Path) -> None:
    write_summary(tmp_path, SUMMARY)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert list(written) == PROMISED_KEYS
    assert written["anchor_digests"]["peer-1"] == "ab" * 32
    with pytest.raises(DiskError, match="summary cannot be written"):
        write_summary(tmp_path / "absent", SUMMARY)


def test_the_table_tells_every_number_of_the_promise() -> None:
    console = Console(file=io.StringIO(), width=120)
    print_table(SUMMARY, console, utilisation=0.94, solo_bits_per_byte=2.6)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    numbers = ("1.5000", "1.8000", "2.1600", "2.6000", "360", "4.0 MB", "8.0 GB", "2000", "94%", "1 / 1", "abab")
    for part in numbers:
        assert part in text


def test_a_ring_all_reduce_of_two_peers_sends_each_gradient_once_and_a_lone_peer_nothing() -> None:
    assert dense_allreduce_nbytes(num_parameters=1000, steps=[10, 10], num_peers=2) == 2 * 10 * 4 * 1000
    assert dense_allreduce_nbytes(num_parameters=1000, steps=[10], num_peers=1) == 0


def test_the_figure_is_drawn_without_a_display(tmp_path: Path) -> None:
    curves = [
        Curve("swarm", tokens=(0, 100), nbytes=(0, 1e6), bits_per_byte=(8.0, 3.0), seconds=(0, 60)),
        Curve("solo", tokens=(0, 25), nbytes=(0, 0), bits_per_byte=(8.0, 4.0), seconds=(0, 60)),
    ]
    draw_figure(tmp_path / "loss.png", curves, title="test")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
