"""The table of coders can be made again: every coder gives back what it was given, and no frame is longer than ours."""

import pytest
import torch

from decentral.compressors import parse_compressor
from decentral.compressors.base import compress_flat
from decentral.state.snapshot import CHUNK_NBYTES
from decentral.wire import body

chunks = pytest.importorskip("experiments.coding.chunks", reason="not part of a source distribution")
measure = pytest.importorskip("experiments.coding.measure", reason="not part of a source distribution")

GRADIENT, SHAPES = torch.randn(400_000, generator=torch.Generator().manual_seed(0)), [(390, 1000), (10_000,)]


@pytest.mark.parametrize("spelling", ["int8(block=64)", "topk(k=64, chunk=4096) >> signmag2", "none"])
def test_every_coder_is_measured_on_what_a_frame_holds(monkeypatch, spelling):
    monkeypatch.setattr(measure, "REPEATS", 1)
    streams = measure.streams_of(spelling, GRADIENT, SHAPES)
    cells = measure.row(spelling, GRADIENT, SHAPES)
    assert len(cells) == 3 + len(measure.coders())
    compressor = parse_compressor(spelling)
    frame = body.encode(compressor, compress_flat(compressor, GRADIENT, SHAPES))
    ours = int(cells[3].split(";")[0].replace(",", ""))
    assert len(frame) <= ours + 16 * len(streams), "lengths beside; a stream that gets no shorter is sent as it is"


@pytest.mark.parametrize("way", chunks.WAYS)
def test_every_way_of_packing_a_chunk_gives_it_back(monkeypatch, capsys, way):
    monkeypatch.setattr(measure, "REPEATS", 1)
    chunks.row(way, [(0.02 * GRADIENT).numpy().tobytes()[:CHUNK_NBYTES]])
    share = float(capsys.readouterr().out.split("|")[2])
    assert 0.8 < share < 0.96
