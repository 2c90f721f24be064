"""tests/parameters/test_schema.py"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decentral.errors import ConfigError, PayloadError
from decentral.parameters import BufferSpec, Fragment, FrozenSpec, ParameterSpec, Schema, schema_of
from decentral.parameters.schema import MANY, boxes_of, holders, is_sharded, pieces_of, whole_of


def schema(*fragments: dict[str, tuple[int, ...]]) -> Schema:
    return Schema(
        tuple(
            Fragment(index, tuple(ParameterSpec(name, shape) for name, shape in named.items()))
            for index, named in enumerate(fragments)
        )
    )


def whole(
    *, kind: str = "float", values: str = "0" * 32, frozen: str = "base.weight", dtype: str = "float32"
) -> Schema:
    buffers = (BufferSpec("norm.running_mean", (3,), kind),)
    return Schema(HERE.fragments, buffers, (FrozenSpec(frozen, (4, 4), dtype, values),))


HERE = schema({"a": (2, 3), "b": ()}, {"head.weight": (256, 64)})

shapes = st.lists(st.integers(0, 100), max_size=4).map(tuple)
schemas = st.lists(
    st.dictionaries(st.text(min_size=1, max_size=8), shapes, min_size=1, max_size=4), min_size=1, max_size=3
)


def test_a_model_as_most_are_is_compressed_parameter_by_parameter():
    usual = schema({"embedding": (50257, 768), **{f"{n}.bias": (768,) for n in range(MANY)}, "head": (50257, 768)})
    assert usual.fragments[0].pieces == usual.fragments[0].shapes


def test_neighbours_are_compressed_together_where_very_many_are_small():
    experts = schema({"embedding": (512, 512), **{f"{n}.lora": (2, 4) for n in range(20_000)}, "head": (512, 512)})
    fragment = experts.fragments[0]
    assert fragment.pieces == ((512, 512), (131_072,), (28_928,), (512, 512))
    assert sum(math.prod(piece) for piece in fragment.pieces) == fragment.numel


@given(st.lists(st.sampled_from([(), (0, 3), (2, 4), (255, 257), (256, 256), (70_000,)]), max_size=400))
def test_pieces_have_the_values_of_the_parameters_in_their_order(shapes):
    pieces = pieces_of(tuple(shapes))
    ends = set(itertools.accumulate(math.prod(shape) for shape in shapes))
    assert set(itertools.accumulate(math.prod(piece) for piece in pieces)) <= ends | {0}
    assert sum(map(math.prod, pieces)) == sum(map(math.prod, shapes))
    assert pieces.count((256, 256)) == shapes.count((256, 256)), "a large one keeps its shape"


@given(schemas)
def test_json_brings_back_the_same_schema_or_names_what_is_twice(fragments):
    made = schema(*fragments)
    names = [name for named in fragments for name in named]
    if len(set(names)) == len(names):
        assert Schema.from_json(made.to_json()) == made
    else:
        with pytest.raises(PayloadError, match="named twice"):
            Schema.from_json(made.to_json())


@given(
    st.text(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=20).map(json.dumps)
)
def test_any_other_text_is_a_payload_error(text):
    with contextlib.suppress(PayloadError):
        assert Schema.from_json(text).fragments


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[[[" + "9" * 5000 + "]]]", "not JSON"),
        ("{}", "fragments: a list"),
        ("[]", "fragments: a list of 1"),
        ("[[]]", "parameters of a fragment: a list of 1"),
        ('[[["a"]]]', r"a parameter is \[name, \[dimensions\]\]"),
        ('[[["a",[1],2]]]', "a parameter is"),
        ('[[["",[1]]]]', "a name 1 to"),
        ('[[["a",[-1]]]]', "a dimension is a whole number"),
        ('[[["a",[true]]]]', "a dimension is a whole number"),
        ('[[["a",[1.0]]]]', "a dimension is a whole number"),
        ('[[["a",[99999999999999]]]]', "a dimension is a whole number"),
        ('[[["a",[9999999,9999999]]]]', "elements are read"),
        ('[[["a",[' + ",".join(["1"] * 17) + "]]]]", "at most 16 dimensions"),
        ('[[["a",[1]]],[["a",[1]]]]', "named twice"),
        ("[" + " " * 2**24 + "]", "characters"),
    ],
    ids=lambda value: value[:20].strip(),
)
def test_rubbish_is_named(text, why):
    with pytest.raises(PayloadError, match=why):
        Schema.from_json(text)


def test_the_digest_names_shapes_order_and_fragments():
    others = [
        schema({"a": (3, 2), "b": ()}, {"head.weight": (256, 64)}),
        schema({"b": (), "a": (2, 3)}, {"head.weight": (256, 64)}),
        schema({"a": (2, 3), "b": (), "head.weight": (256, 64)}),
        schema({"a": (2, 3), "c": ()}, {"head.weight": (256, 64)}),
    ]
    assert len({HERE.digest, *(other.digest for other in others)}) == 5
    assert len(HERE.digest) == 32
    assert HERE.digest == Schema.from_json(HERE.to_json()).digest


def test_the_canonical_json_is_pinned():
    """It is hashed into the run's name: these characters may not change."""
    assert HERE.to_json() == '[[["a",[2,3]],["b",[]]],[["head.weight",[256,64]]]]'


def test_differences_are_readable():
    there = schema({"a": (2, 3), "c": (4,)}, {"head.weight": (256, 128)})
    assert HERE.describe_difference(there) == [
        "b: () here, absent in the run",
        "head.weight: (256, 64) here, (256, 128) in the run",
        "c: absent here, (4,) in the run",
    ]
    assert HERE.describe_difference(HERE) == []


def test_another_order_and_another_fragment_are_differences_too():
    turned = schema({"b": (), "a": (2, 3)}, {"head.weight": (256, 64)})
    assert HERE.describe_difference(turned)[0] == "a: place 0 of fragment 0 here, place 1 of fragment 0 in the run"
    together = schema({"a": (2, 3), "b": (), "head.weight": (256, 64)})
    assert HERE.describe_difference(together) == [
        "head.weight: place 0 of fragment 1 here, place 2 of fragment 0 in the run"
    ]


def test_json_brings_back_buffers_and_what_is_frozen() -> None:
    assert Schema.from_json(whole().to_json()) == whole()
    assert whole().to_json() == (
        '{"fragments":[[["a",[2,3]],["b",[]]],[["head.weight",[256,64]]]],'
        '"buffers":[["norm.running_mean",[3],"float"]],"frozen":[["base.weight",[4,4],"float32","' + "0" * 32 + '"]]}'
    )


def test_buffers_and_frozen_values_are_part_of_the_digest() -> None:
    others = [whole(), whole(kind="integer"), whole(values="1" * 32), whole(dtype="bfloat16"), whole(frozen="x"), HERE]
    assert len({other.digest for other in others}) == len(others)


WHOLE = {"fragments": [[["a", [2]]]], "buffers": [["b", [3], "float"]], "frozen": [["c", [4], "int8", "0" * 32]]}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"buffers": [], "frozen": []}, "a list of fragments is wanted, or a table"),
        ({"extra": []}, "a list of fragments is wanted, or a table"),
        ({"buffers": None}, "buffers: a list of 0"),
        ({"frozen": {}}, "frozen: a list of 0"),
        ({"fragments": []}, "fragments: a list of 1"),
        ({"buffers": [["b", [3]]]}, "a buffer is"),
        ({"buffers": [["b", [3], "complex"]]}, "a buffer is"),
        ({"buffers": [["b", [-3], "float"]]}, "a dimension is"),
        ({"buffers": [["a", [3], "float"]]}, "named twice"),
        ({"buffers": [["b", [2**30, 2**30], "float"]]}, "elements are read"),
        ({"frozen": [["c", [4], "int8"]]}, "a frozen parameter is"),
        ({"frozen": [["c", [4], "int8; rm", "0" * 32]]}, "a frozen parameter is"),
        ({"frozen": [["c", [4], "int8", "0" * 31]]}, "a frozen parameter is"),
        ({"frozen": [["c", [4], "int8", "G" * 32]]}, "a frozen parameter is"),
        ({"frozen": [["c", [4], 8, "0" * 32]]}, "a frozen parameter is"),
    ],
    ids=str,
)
def test_rubbish_in_the_table_is_named(change, why) -> None:
    assert Schema.from_json(json.dumps(WHOLE)).frozen[0].dtype == "int8"
    with pytest.raises(PayloadError, match=why):
        Schema.from_json(json.dumps(WHOLE | change))


def test_differences_of_buffers_and_of_what_is_frozen_are_readable() -> None:
    def difference(there: Schema) -> list[str]:
        return whole().describe_difference(there)

    base = "base.weight: frozen, other values here than in the run: the base model differs"
    assert difference(whole(values="1" * 32)) == [base]
    assert difference(whole(dtype="bfloat16")) == ["base.weight: frozen, float32 here, frozen, bfloat16 in the run"]
    assert difference(whole(kind="integer")) == [
        "norm.running_mean: buffer of floats here, buffer of integers in the run"
    ]
    assert difference(HERE) == [
        "norm.running_mean: buffer (3,) here, absent in the run",
        "base.weight: frozen (4, 4) here, absent in the run",
    ]
    assert HERE.describe_difference(whole(frozen="b"))[0] == "b: trained here, frozen in the run"


def test_a_schema_knows_its_size():
    assert HERE.numel == 2 * 3 + 1 + 256 * 64
    assert schema_of({"w": torch.nn.Parameter(torch.zeros(2, 5))}).numel == 10


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
