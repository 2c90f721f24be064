import contextlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decentral.errors import PayloadError
from decentral.parameters import Fragment, ParameterSpec, Schema, schema_of


def schema(*fragments: dict[str, tuple[int, ...]]) -> Schema:
    return Schema(
        tuple(
            Fragment(index, tuple(ParameterSpec(name, shape) for name, shape in named.items()))
            for index, named in enumerate(fragments)
        )
    )


HERE = schema({"a": (2, 3), "b": ()}, {"head.weight": (256, 64)})

shapes = st.lists(st.integers(0, 100), max_size=4).map(tuple)
schemas = st.lists(
    st.dictionaries(st.text(min_size=1, max_size=8), shapes, min_size=1, max_size=4), min_size=1, max_size=3
)


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


def test_a_schema_knows_its_size():
    assert HERE.numel == 2 * 3 + 1 + 256 * 64
    assert schema_of({"w": torch.nn.Parameter(torch.zeros(2, 5))}).numel == 10
