from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decentral.errors import ConfigError
from decentral.parameters.schema import boxes_of, holders, is_sharded, whole_of


@dataclass(frozen=True)
class Shard:
    dim: int


class Replicate:
    pass


class _StridedShard:
    pass


def placed(shape: tuple[int, ...], mesh: tuple[int, ...], *kinds: Any) -> Any:
    ranks = torch.arange(torch.Size(mesh).numel()).reshape(mesh)
    return SimpleNamespace(shape=torch.Size(shape), device_mesh=SimpleNamespace(mesh=ranks), placements=kinds)


def test_every_process_has_the_rows_that_torch_chunks_for_it():
    whole = torch.arange(33 * 2).reshape(33, 2)
    boxes = boxes_of(placed((33, 2), (4,), Shard(0)))
    chunks = whole.chunk(4)
    assert [boxes[rank].of(whole).tolist() for rank in range(4)] == [chunk.tolist() for chunk in chunks]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.sampled_from([0, 1]))
def test_the_boxes_of_all_holders_are_the_whole_once(rows, columns, processes, dim):
    whole = torch.zeros(rows, columns)
    for box in holders(boxes_of(placed((rows, columns), (processes,), Shard(dim)))).values():
        box.of(whole).add_(1.0)
    assert torch.equal(whole, torch.ones(rows, columns))


def test_a_replica_of_a_shard_is_asked_for_nothing():
    boxes = boxes_of(placed((8, 3), (2, 2), Replicate(), Shard(0)))
    assert boxes[0] == boxes[2] != boxes[1] == boxes[3]
    assert list(holders(boxes)) == [0, 1]


def test_two_dimensions_of_a_mesh_shard_one_after_the_other():
    whole = torch.arange(10 * 3).reshape(10, 3)
    boxes = boxes_of(placed((10, 3), (2, 2), Shard(0), Shard(1)))
    parts = [half.chunk(2, dim=1)[column] for half, column in itertools.product(whole.chunk(2), range(2))]
    assert [boxes[rank].of(whole).tolist() for rank in range(4)] == [part.tolist() for part in parts]


def test_a_placement_that_is_no_box_is_refused():
    with pytest.raises(ConfigError, match="without tensor parallelism"):
        boxes_of(placed((8, 3), (2,), _StridedShard()))


def test_a_plain_tensor_is_whole():
    tensor = torch.ones(3, requires_grad=True)
    assert not is_sharded(tensor)
    assert torch.equal(whole_of(tensor), tensor)
