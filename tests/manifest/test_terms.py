"""The digest names the run: equal values, equal id, whatever the file looks like."""

import random
from collections.abc import Callable

import pytest

from decentral.errors import ConfigError
from decentral.manifest import Manifest, differences, parse_manifest, preset_manifest, summary
from decentral.optimizers import describe_keys

SHORTEST = """
[run]
name = "small"
[outer]
method = "diloco"
[compressor]
chain = "int8(block=4096)"
[exchange]
kind = "reduce"
"""


@pytest.fixture
def manifest() -> Manifest:
    return parse_manifest(SHORTEST)


def test_what_is_left_out_has_a_default_and_what_may_be_unset_is(manifest: Manifest) -> None:
    assert manifest.inner.steps == 30
    assert manifest.outer.learning_rate is None
    assert manifest.run.minutes is None


def test_the_digest_of_these_terms_is_as_it_always_was(manifest: Manifest) -> None:
    assert manifest.digest.hex() == "f69d9f411048cec475f3c6bd5a20b9939651290a1ffe51c9f32e176f6cef5da6"
    assert manifest.run_id == manifest.digest.hex()[:12]


def test_order_comments_spaces_and_spelling_of_numbers_do_not_change_the_digest(manifest: Manifest) -> None:
    other = """
    exchange.kind = 'reduce'  # a comment
    [outer]
    method = "diloco"
    [compressor]
    chain = "int8( block = 4096 )"
    [swarm]
    lease = 15
    deadline_floor = 2e0
    [inner]
    learning_rate = 1e-3
    weight_decay = 0.10
    steps = 3_0
    [run]
    name = "small"
    """
    assert parse_manifest(other).digest == manifest.digest


def test_a_minus_zero_is_a_zero(manifest: Manifest) -> None:
    zero, minus = (manifest.changed(inner={"weight_decay": value}) for value in (0.0, -0.0))
    assert zero.digest == minus.digest


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("run", "name", "large"),
        ("run", "salt", "x"),
        ("run", "seed", 1),
        ("run", "rounds", 101),
        ("run", "minutes", 1.0),
        ("model", "task", "custom"),
        ("model", "hidden", 64),
        ("data", "corpus", "poems"),
        ("data", "held_out", 0.1),
        ("inner", "steps", 31),
        ("inner", "learning_rate", 0.0010000001),
        ("inner", "clip", 1.0),
        ("outer", "method", "sparseloco"),
        ("outer", "momentum", 0.0),
        ("outer", "overlap", 1),
        ("compressor", "chain", "fp16"),
        ("compressor", "feedback", "dgc"),
        ("exchange", "kind", "gather"),
        ("swarm", "min_peers", 2),
    ],
)
def test_every_changed_key_is_another_run_and_is_named_in_the_difference(
    manifest: Manifest, table: str, key: str, value: object
) -> None:
    other = manifest.changed(**{table: {key: value}})
    assert other.digest != manifest.digest
    (line,) = differences(manifest, other)
    assert line.startswith(f"{table}.{key}: ")
    assert " here, " in line
    assert line.endswith(" there")


def test_a_text_s_digest_is_part_of_the_terms_and_needs_a_label(manifest: Manifest) -> None:
    labelled = manifest.changed(data={"corpus": "poems"})
    named = labelled.changed(data={"digest": "ab" * 32})
    assert named.digest != labelled.digest
    assert f"poems {'ab' * 4}, batch" in summary(named)
    assert parse_manifest(named.to_toml()).data.digest == "ab" * 32
    with pytest.raises(ConfigError, match=r"data\.digest is of text that a label names"):
        manifest.changed(data={"digest": "ab" * 32})


def test_equal_manifests_do_not_differ(manifest: Manifest) -> None:
    assert differences(manifest, parse_manifest(SHORTEST)) == []


def test_an_unset_key_is_called_unset(manifest: Manifest) -> None:
    other = manifest.changed(run={"minutes": 2.5})
    assert differences(manifest, other) == ["run.minutes: unset here, 2.5 there"]


def test_the_written_file_is_read_back_with_the_same_digest(manifest: Manifest) -> None:
    rng = random.Random(0)
    for _ in range(50):
        changed = manifest.changed(
            run={"seed": rng.randrange(2**63), "minutes": rng.choice([None, rng.uniform(0.1, 1e6)])},
            inner={"learning_rate": 10 ** rng.uniform(-9, 1), "clip": rng.choice([None, 1e22, 0.1])},
            compressor={"feedback": rng.choice(["none", f"ef(beta={rng.random()})"])},
        )
        assert parse_manifest(changed.to_toml()).digest == changed.digest
        assert parse_manifest(changed.to_toml()) == changed


def test_a_copy_made_without_checks_has_the_digest_of_its_file(manifest: Manifest) -> None:
    copy = manifest.model_copy(update={"swarm": manifest.swarm.model_copy(update={"lease": 20})})
    assert parse_manifest(copy.to_toml()).digest == copy.digest


def test_every_key_has_a_comment_in_the_file(manifest: Manifest) -> None:
    lines = [line for line in manifest.to_toml().splitlines()[1:] if line]
    keys = sum(len(type(getattr(manifest, table)).model_fields) for table in Manifest.model_fields)
    keys += len(describe_keys(manifest.outer.method))
    assert len(lines) == keys + len(Manifest.model_fields)
    assert all("  # " in line for line in lines)


def test_a_manifest_cannot_be_changed_in_place(manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match=r"steps = 5: a manifest is frozen.* manifest.changed\(run="):
        manifest.inner.steps = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: Manifest(run={"name": "x"}), "Manifest: outer is missing; add the table"),
        (lambda: Manifest.of([], "terms"), r"terms = \[\]: a list; give its tables by their names, as a dict"),
        (lambda: Manifest.of({"run": 3}, "terms"), "terms: run = 3: input should be"),
        (lambda: preset_manifest("diloco").changed(run=5), "manifest.changed: run = 5: a int; give the table's keys"),
        (lambda: preset_manifest("diloco", swarm=5), "preset diloco: swarm = 5: a int; give the table's keys"),
        (lambda: preset_manifest("diloco", rounds="x"), "preset diloco: run.rounds = 'x': input should be a valid int"),
        (
            lambda: preset_manifest("diloco", outer={"fragmets": 3}),
            "unknown key outer.fragmets; did you mean fragments",
        ),
        (lambda: preset_manifest(3), "preset '3' does not exist"),
    ],
)
def test_tables_that_are_none_are_one_line(made: Callable[[], Manifest], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        made()
    assert "\n" not in str(caught.value)


def test_a_change_that_cannot_be_is_refused_and_leaves_the_old_one(manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match=r"changed manifest: unknown key inner.step; did you mean steps\?"):
        manifest.changed(inner={"step": 5})
    assert manifest.inner.steps == 30


def test_the_hyper_parameters_have_the_names_that_optimizers_know(manifest: Manifest) -> None:
    outer = manifest.changed(outer={"learning_rate": 0.5, "momentum": 0.9, "gamma": 0.1}).outer
    assert outer.hyper == {"lr": 0.5, "momentum": 0.9, "gamma": 0.1}


def test_the_summary_says_what_joining_means_in_a_few_lines(manifest: Manifest) -> None:
    text = summary(manifest.changed(run={"minutes": 90.0}, outer={"overlap": 5, "fragments": 2}))
    assert "small (" in text
    assert "100 outer steps or 90 minutes" in text
    assert "2 fragments in turn, training goes on for 5 steps meanwhile" in text
    assert "int8(block=4096), reduce" in text
    assert len(text.splitlines()) == 7
    assert all(len(line) < 120 for line in text.splitlines())
    asked = summary(manifest.changed(swarm={"redundancy": {"keepers": 4}}))
    assert "keeps   1024 MB of others' sealed state in memory at most; 4 members keep yours, 2 give it back" in asked
    assert "your own script's" in summary(manifest.changed(model={"task": "custom"}))


def test_a_copy_with_other_values_has_a_digest_of_its_own() -> None:
    terms = preset_manifest("diloco")
    before, run = terms.digest, terms.run.model_copy(update={"rounds": terms.run.rounds + 1})
    assert terms.model_copy(update={"run": run}).digest == terms.changed(run={"rounds": run.rounds}).digest != before
    assert terms.model_copy().digest == before


@pytest.mark.parametrize(("skip", "fragments", "most"), [(None, 8, 0), (0.25, 8, 2), (0.3, 4, 1), (0.29, 100, 29)])
def test_a_share_of_the_fragments_may_be_nobodys(skip: float | None, fragments: int, most: int) -> None:
    outer = {"fragments": fragments, "layout": "stages", "skip": skip}
    terms = preset_manifest("diloco", steps=fragments, outer=outer, model={"task": "custom"})
    assert terms.outer.most_skipped == most
