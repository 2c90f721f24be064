import json
import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from decentral import plugins
from decentral.compressors import parse_compressor, parse_feedback
from decentral.errors import ConfigError
from decentral.manifest import Manifest
from decentral.manifest.presets import check_methods, preset_manifest
from decentral.manifest.table import canonical
from decentral.optimizers import OuterMethod, _methods, bring, describe_optimizers, make_outer, presets
from decentral.optimizers.diloco import DiLoCo, outer_learning_rate
from decentral.optimizers.noloco import NoLoCo
from tests.kit.tables import PRESETS


def test_every_name_makes_its_method():
    for name in PRESETS:
        made = make_outer(name, {})
        assert isinstance(made, OuterMethod)
        assert made.name == name
    assert make_outer("noloco", {}) == NoLoCo()


def test_hyper_parameters_are_passed_on():
    assert make_outer("diloco", {"lr": 1, "momentum": 0.0}) == DiLoCo(lr=1, momentum=0.0)


@pytest.mark.parametrize(
    ("name", "hyper", "message"),
    [
        ("dilocco", {}, r"optimizer dilocco is not known here; .* install that package, or did you mean diloco\?"),
        ("zzzzz", {}, r"known: .*diloco, .*sparseloco"),
        ("diloco", {"momentun": 0.9}, r"has no momentun; did you mean momentum\?"),
        ("sparseloco", {"lr": "fast"}, "lr='fast' must be a number"),
        ("noloco", {"alpha": True}, "alpha=True must be a number"),
        ("noloco", {"alpha": 0.9, "gamma": 0.7}, "replicas drift apart"),
    ],
)
def test_what_cannot_be_meant_says_what_could(name, hyper, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_outer(name, hyper)
    assert "\n" not in str(caught.value)


def test_every_method_is_described_with_its_equation_and_source():
    rows = {row["name"]: row for row in describe_optimizers()}
    assert set(rows) >= set(PRESETS)
    assert all(re.search(r"arXiv:|openreview\.net/", row["source"]) and row["equation"] for row in rows.values())
    diloco, des_loc, noloco = rows["diloco"], rows["des_loc"], rows["noloco"]
    assert diloco["keys"] == {"momentum": 0.9, "restart": 0}  # learning_rate is unset: it follows the contributors
    assert (diloco["family"], diloco["state_per_parameter"]) == ("synchronous", 1)
    assert diloco["sent_bits_per_parameter"] == pytest.approx(16.0, abs=0.1)  # int8, to the owners and by one
    assert des_loc["sent_bits_per_parameter"] == 2 * 16 * (1 + 1 / 3 + 1 / 6)
    assert (noloco["family"], noloco["sent_bits_per_parameter"]) == ("gossip", 32)
    assert rows["delayed_nesterov"]["family"] == "asynchronous"


def test_errors_speak_of_a_method_as_its_manifest_does():
    spoken = r"^diloco\(learning_rate=0\.7, momentum=1\.5, restart=0\): momentum must be in"
    with pytest.raises(ConfigError, match=spoken):
        make_outer("diloco", {"lr": 0.7, "momentum": 1.5})


def test_another_package_adds_a_method(monkeypatch: pytest.MonkeyPatch):
    points = EntryPoints([EntryPoint("mine", "decentral.optimizers.diloco:DiLoCo", "decentral.optimizers")])
    monkeypatch.setattr(plugins, "entry_points", lambda **wanted: points.select(**wanted))
    assert make_outer("mine", {"lr": 0.3}) == DiLoCo(lr=0.3)
    assert "mine" in {row["name"] for row in describe_optimizers()}


@pytest.mark.parametrize("name", presets())
def test_every_preset_names_things_that_exist(name):
    preset = presets()[name]
    check_methods(preset_manifest(name))
    assert str(parse_compressor(preset.compressor)) == preset.compressor
    assert str(parse_feedback(preset.feedback)) == preset.feedback
    assert preset.fragments >= 1
    assert preset.overlap >= 0


def test_the_presets_are_the_papers():
    exchanges = {name: preset.exchange for name, preset in presets().items()}
    papers = {"diloco": "reduce", "streaming": "reduce", "sparseloco": "gather", "noloco": "pair"}
    assert {name: exchanges[name] for name in papers} == papers
    assert [outer_learning_rate(peers) for peers in (1, 4, 8)] == [0.4, 0.6, 0.8]
    assert presets()["sparseloco"].feedback == "ef(beta=0.95)"
    streaming = presets()["streaming"]
    assert (streaming.fragments, streaming.overlap, streaming.hyper["alpha"]) == (3, 1, 0.5)


def test_the_canonical_form_of_a_manifest_names_the_same_method():
    """It spells every number of a method as a float, and whole ones were refused when it was read again."""
    manifest = preset_manifest("decoupled", outer={"wait_for": 8})
    again = Manifest.of(json.loads(canonical(manifest)), "again")
    assert make_outer("decoupled", again.outer.hyper) == make_outer("decoupled", manifest.outer.hyper)
    assert again.digest == manifest.digest


@pytest.mark.parametrize("value", [1.5, float("inf"), float("nan")])
def test_a_key_that_counts_takes_whole_numbers_only(value):
    with pytest.raises(ConfigError, match="must be a whole number"):
        make_outer("decoupled", {"wait_for": value})


def test_a_method_of_others_that_states_no_preset_has_a_plain_one(monkeypatch: pytest.MonkeyPatch):
    class Mine(OuterMethod):
        name = "mine"

    points = EntryPoints([EntryPoint("broken", "nowhere:Mine", "decentral.optimizers")])
    monkeypatch.setattr(plugins, "entry_points", lambda **wanted: points.select(**wanted))
    with pytest.raises(ConfigError, match="write @dataclass"):
        bring(Mine)
    frozen = dataclass(frozen=True)(Mine)
    bring(frozen)
    try:
        made = preset_manifest("mine")
        assert (made.compressor.chain, made.exchange.kind, made.outer.method) == ("none", "gather", "mine")
        assert "mine" not in presets(ours=True)
        assert "broken" not in presets()
    finally:
        _methods().brought.clear()
    frozen.name = "diloco"
    with pytest.raises(ConfigError, match="diloco is the name of one of ours"):
        bring(frozen)


@pytest.mark.parametrize("gone", ["quorum", "is_due"])
def test_a_method_that_states_its_timing_as_methods_once_did_is_refused(gone: str):
    """Nobody asked them any more, and its peers took part by other timing than its author meant."""
    with pytest.raises(ConfigError, match=rf"Old\.{gone}: nobody asks it any more; declare `timing`"):
        type("Old", (OuterMethod,), {gone: lambda self: None})
