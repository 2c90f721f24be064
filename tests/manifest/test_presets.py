"""The table of lines and presets: whole, in order, and with evidence that is there."""

from pathlib import Path

import pytest

from decentral.errors import ConfigError
from decentral.manifest import check_methods, fresh_salt, parse_manifest, preset_manifest
from decentral.manifest.presets import class_of, classes, default_preset, default_scale, find_justification, no_faster
from decentral.manifest.table import canonical
from decentral.optimizers import presets

LOG = Path(__file__).parents[2] / "experiments" / "LOG.md"


def test_classes_are_those_of_the_documents_slowest_first() -> None:
    assert [one.up_to for one in classes()] == ["5mbit", "20mbit", "100mbit", "1gbit"]
    assert [one.rate for one in classes()] == sorted(one.rate for one in classes())


@pytest.mark.parametrize("one", classes(), ids=lambda one: one.up_to)
def test_every_class_names_a_preset_of_which_something_is_known_and_its_table_is_in_the_log(one) -> None:
    """No figure without the entry that it is from."""
    known = find_justification(one.preset)
    assert known is not None
    assert known.least <= known.shown
    assert preset_manifest(one.preset).outer.method == one.preset
    place, date, title = known.table.split(", ", 2)
    assert place == "experiments/LOG.md"
    assert f"## {date} {title}\n" in LOG.read_text(encoding="utf-8")
    assert f"{known.seeds} seed" in known.evidence
    assert ("which is thin" in known.evidence) == (known.seeds < 5)


def test_a_line_belongs_to_the_first_class_that_it_fits_into_and_a_faster_one_to_the_last() -> None:
    rates = (1e5, 625_000.0, 625_001.0, 2.5e6, 12.5e6, 125e6, 1e10)
    assert [class_of(rate).up_to for rate in rates] == [
        "5mbit", "5mbit", "20mbit", "20mbit", "100mbit", "1gbit", "1gbit",
    ]  # fmt: skip


def test_presets_of_slower_classes_are_tried_after_its_own() -> None:
    assert no_faster(class_of(125e6)) == ["muloco", "sparseloco"]
    assert no_faster(class_of(1e5)) == ["sparseloco"]


def test_of_other_presets_nothing_is_written_down() -> None:
    assert find_justification("noloco") is None


# ---- test presets ----
#
# Presets are whole manifests of algorithms that exist.

every_preset = pytest.mark.parametrize("preset", sorted(presets()))


@every_preset
def test_a_preset_exists_fits_together_and_is_written_and_read_back(preset: str) -> None:
    manifest = preset_manifest(preset)
    check_methods(manifest)
    assert parse_manifest(manifest.to_toml()).digest == manifest.digest
    assert manifest.run.name == preset
    assert manifest.compressor.chain == presets()[preset].compressor
    assert manifest.exchange.kind == presets()[preset].exchange


def test_two_runs_of_one_preset_are_two_runs_unless_they_share_a_salt() -> None:
    assert preset_manifest("diloco").digest != preset_manifest("diloco").digest
    same = [preset_manifest("diloco", run={"salt": "word"}).digest for _ in range(2)]
    assert same[0] == same[1]
    assert fresh_salt() != fresh_salt()


def test_keys_can_be_changed_by_table() -> None:
    manifest = preset_manifest("streaming", run={"name": "mine", "rounds": 7}, inner={"steps": 60})
    assert (manifest.run.name, manifest.run.rounds, manifest.inner.steps) == ("mine", 7, 60)
    assert manifest.outer.fragments == presets()["streaming"].fragments
    assert manifest.inner.clip == 1.0


@pytest.mark.parametrize(
    ("layers", "fragments", "steps"), [(2, 3, 30), (6, 3, 30), (12, 5, 30), (24, 9, 36), (96, 33, 66)]
)
def test_streaming_has_a_fragment_for_every_three_blocks_and_one_for_the_rest(
    layers: int, fragments: int, steps: int
) -> None:
    manifest = preset_manifest("streaming", model={"layers": layers})
    assert (manifest.outer.fragments, manifest.inner.steps) == (fragments, steps)
    assert preset_manifest("streaming", model={"layers": layers}, outer={"fragments": 2}).outer.fragments == 2
    assert preset_manifest("streaming", model={"layers": layers, "task": "custom"}).outer.fragments == 3
    assert preset_manifest("diloco", model={"layers": layers}).outer.fragments == 1


def test_inner_steps_that_were_chosen_are_not_rounded_to_the_fragments() -> None:
    with pytest.raises(ConfigError, match=r"inner\.steps = 30 is no multiple of outer\.fragments = 9"):
        preset_manifest("streaming", steps=30, model={"layers": 24})


def test_rounds_and_inner_steps_can_be_said_without_their_tables() -> None:
    manifest = preset_manifest("diloco", rounds=7, steps=12, run={"name": "mine"})
    assert (manifest.run.name, manifest.run.rounds, manifest.inner.steps) == ("mine", 7, 12)


def test_what_only_the_built_in_model_heeds_is_not_written_for_a_scripts_own_and_told_where_it_is_set() -> None:
    usual = preset_manifest("diloco", model={"task": "custom"})
    text = usual.to_toml()
    assert not [key for key in ("hidden", "batch_size", "clip", "warmup", "experts") if f"\n{key} = " in text]
    assert parse_manifest(text).digest == usual.digest
    assert usual.idle == []
    older = usual.changed(inner={"clip": 1.0}, data={"batch_size": 8})
    assert older.idle == ["data.batch_size", "inner.clip"]
    assert parse_manifest(older.to_toml()).digest == older.digest
    assert preset_manifest("diloco", data={"batch_size": 8}).idle == []


def test_the_dense_method_is_the_default_while_the_line_carries_it() -> None:
    assert default_preset(default_scale()) == "diloco"
    assert default_preset(default_scale(parameters=30_000_000)) == "sparseloco"
    assert default_preset(default_scale(parameters=20_000_000, peers=2)) == "diloco"
    assert default_scale(parameters=25_000_000, peers=2).carries_dense
    assert not default_scale(parameters=25_000_001, peers=2).carries_dense


def test_dilocos_outer_rate_is_left_to_the_number_of_contributors() -> None:
    outer = preset_manifest("diloco").outer
    assert outer.learning_rate is None
    assert outer.hyper == {"momentum": 0.9}
    assert preset_manifest("streaming").outer.hyper == {"lr": 0.4, "momentum": 0.9, "alpha": 0.5}


def test_an_unknown_preset_or_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"preset 'sparsloco' does not exist; did you mean sparseloco\?"):
        preset_manifest("sparsloco")
    with pytest.raises(ConfigError, match=r"known: .*diloco, "):
        preset_manifest("xyz")
    with pytest.raises(ConfigError, match=r"unknown key run.round; did you mean rounds\?"):
        preset_manifest("diloco", run={"round": 3})
    with pytest.raises(ConfigError, match=r"unknown table swrm; did you mean swarm\?"):
        preset_manifest("diloco", swrm={"lease": 3})
    with pytest.raises(ConfigError, match=r"outer\.overlap = 30 must be below"):
        preset_manifest("diloco", outer={"overlap": 30})


@pytest.mark.parametrize(
    ("method", "key", "says"),
    [
        ("des_loc", "delay", "it is one of delayed_nesterov, and des_loc has first_moment, second_moment, moments"),
        (
            "edit",
            "first_moment",
            "it is one of des_loc, and edit has momentum, relative_temperature, clip, warmup, relearn_after",
        ),
        ("sparseloco", "alpha", "it is one of noloco, streaming, and sparseloco has none of its own"),
        ("edit", "temperature", "did you mean relative_temperature?"),
    ],
)
def test_a_key_of_another_method_is_told_whose_it_is(method: str, key: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_methods(preset_manifest(method, outer={key: 2}))
    assert str(refused.value) == f"unknown key outer.{key}; {says}"


@pytest.mark.parametrize("key", ["first_moment", "second_moment"])
def test_a_period_of_no_rounds_is_refused_by_its_key(key: str) -> None:
    with pytest.raises(ConfigError, match="first_moment and second_moment are rounds, 1 or more"):
        check_methods(preset_manifest("des_loc", outer={key: 0}))


def test_a_clip_that_is_unset_changes_no_digest() -> None:
    assert b"norm_clip" not in canonical(preset_manifest("streaming", outer={"norm_clip": None}))
