"""[outer.aggregation]: a table inside a table, whose rule says what other keys it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decentral.errors import ConfigError
from decentral.manifest import (
    Manifest,
    check_methods,
    differences,
    load_manifest,
    parse_manifest,
    preset_manifest,
    rule_of,
    summary,
)
from decentral.optimizers import aggregation_names, describe_aggregation_keys, make_aggregation

TEXT = """
[run]
name = "small"
[outer]
method = "diloco"
{line}
[compressor]
chain = "int8(block=4096)"
[exchange]
kind = "{kind}"
"""


def manifest_with(*lines: str, kind: str = "gather") -> Manifest:
    return parse_manifest(TEXT.format(line="\n".join(lines), kind=kind))


def krum(**keys: Any) -> Manifest:
    outer = {"norm_clip": None, "aggregation": {"rule": "krum", **keys}}
    return preset_manifest("sparseloco", run={"salt": "one"}, outer=outer)


def test_a_manifest_without_the_table_has_the_digest_it_always_had():
    plain = manifest_with(kind="reduce")
    assert plain.digest.hex() == "f69d9f411048cec475f3c6bd5a20b9939651290a1ffe51c9f32e176f6cef5da6"
    assert rule_of(plain) == make_aggregation("mean", {})
    assert rule_of(manifest_with('norm_clip = "median"')) == make_aggregation("norm_clip", {})
    assert rule_of(manifest_with('norm_clip = "none"')) == make_aggregation("mean", {})


def test_the_table_is_part_of_the_digest_and_of_what_differs_and_what_joining_means():
    manifest = krum(f=2)
    assert len({manifest.digest, krum().digest, krum(f=1).digest, krum(f=2.0).digest}) == 3
    other = manifest.changed(outer={"aggregation": {"rule": "rfa"}})
    assert differences(manifest, other) == [
        'outer.aggregation.rule: "krum" here, "rfa" there',
        "outer.aggregation.f: 2.0 here, unset there",
    ]
    plain = manifest.changed(outer={"aggregation": None})
    assert 'outer.aggregation.rule: "krum" here, unset there' in differences(manifest, plain)
    assert "aggregated by krum f 2" in summary(manifest)


def test_the_written_file_has_a_comment_for_each_key_and_is_read_back():
    manifest = krum(f=2)
    text = manifest.to_toml()
    assert "[outer.aggregation]" in text
    assert "f = 2  " in text
    assert parse_manifest(text) == manifest
    assert parse_manifest(text).digest == manifest.digest
    assert all("#" in line for line in text.splitlines() if line)
    unset = preset_manifest("sparseloco").to_toml()
    assert '# aggregation.rule = "rfa"' in unset


@pytest.mark.parametrize("rule", aggregation_names())
def test_every_rule_is_written_with_its_keys_and_read_back_also_where_they_are_unset(rule: str):
    outer = {"norm_clip": None, "aggregation": {"rule": rule}}
    text = preset_manifest("diloco", outer=outer, exchange={"kind": "gather"}).to_toml()
    assert rule_of(parse_manifest(text)) == make_aggregation(rule, {})
    table = text.split("[outer.aggregation]")[1].split("\n[")[0]
    keys = [key for key, _, _ in describe_aggregation_keys(rule)]
    assert [line.split(" =")[0] for line in table.splitlines()[1:]] == ["rule", *(f"# {key}" for key in keys)]


def test_the_line_that_the_file_proposes_works_without_its_comment_sign(tmp_path: Path):
    manifest = preset_manifest("sparseloco", outer={"norm_clip": None})
    path = tmp_path / "run.toml"
    path.write_text(manifest.to_toml().replace("# aggregation.rule", "aggregation.rule"), encoding="utf-8")
    assert rule_of(load_manifest(path)) == make_aggregation("rfa", {})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('aggregation = "krum"', r"outer\.aggregation = 'krum'"),
        ("aggregation.f = 1", r"outer\.aggregation\.rule is missing; rule means: decentral aggregation lists them"),
        ('aggregation = {rule = "krum", f = [1]}', "f of a method must be a number or a word"),
        ('aggregation = {rule = "krum", f = inf}', "f must be finite"),
        ('aggregation = {rule = "krum", Ff = 1}', "small letters"),
        ('aggregation = {rule = "a b"}', r"outer\.aggregation\.rule = 'a b': has characters that do not belong"),
    ],
)
def test_what_cannot_be_a_table_of_a_rule_is_refused_where_it_is_read(line: str, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        manifest_with(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("then", ["rfa(start=zero)", "nnm(then=krum)", "krum"])
def test_a_rule_after_another_may_have_keys_that_are_words(then: str) -> None:
    rule = {"rule": "bucketing", "then": then}
    manifest = preset_manifest(
        "local_sgd", outer={"aggregation": rule, "norm_clip": "none"}, exchange={"kind": "gather"}
    )
    check_methods(manifest)
    assert parse_manifest(manifest.to_toml()).digest == manifest.digest
