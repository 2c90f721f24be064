from importlib.metadata import EntryPoint, EntryPoints

import pytest

from decentral import plugins
from decentral.compressors import Int8, SignMag2, TopK, describe_compressors, parse_compressor
from decentral.errors import ConfigError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Pretend that another package declares these entry points."""

    def declare(**points: str) -> None:
        found = EntryPoints(EntryPoint(name, value, "decentral.compressors") for name, value in points.items())
        monkeypatch.setattr(plugins, "entry_points", lambda **wanted: found.select(**wanted))

    return declare


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("none", "none"),
        ("int8", "int8(block=4096)"),
        ("int8()", "int8(block=4096)"),
        ("  topk( chunk = 1024,k=16 )>>signmag2 ", "topk(k=16, chunk=1024) >> signmag2"),
        ("topk >> e3m0", "topk(k=64, chunk=4096) >> e3m0(block=256)"),
    ],
)
def test_a_spelling_has_one_canonical_form(spelling, canonical):
    assert str(parse_compressor(spelling)) == canonical


def test_the_spelling_of_sparseloco():
    assert parse_compressor("topk(k=64, chunk=4096) >> signmag2") == TopK(k=64, chunk=4096) >> SignMag2()


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("topkk", "topkk is not known here; if a package adds it, install that package, or did you mean topk?"),
        ("in8(block=4)", "did you mean int8?"),
        ("zzz", "known: bf16, .*int8, .*topk"),
        ("int8(blok=4)", "int8 has no blok; did you mean block?"),
        ("signmag2(k=1)", "signmag2 has no k; known: nothing"),
        ("int8(block=4.5)", "must be a whole number"),
        ("int8(block=four)", "block='four' must be a number"),
        ("int8(4)", '"4" is not key=number'),
        ("int8(block=4,)", '"" is not key=number'),
        ("int8(block=4, block=5)", "given twice"),
        ("int8(block=4", "want name or name"),
        ("", "want name or name"),
        ("topk >> ", "want name or name"),
        ("topk >> int8 >> fp16", "one >> joins two methods"),
        ("int8 >> topk", "left side of >>"),
        ("__import__('os')", "want name or name|is not key=number"),
        ("topk" * 100, "at most 256"),
    ],
)
def test_a_spelling_that_cannot_be_meant_says_what_could(spelling, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")) as caught:
        parse_compressor(spelling)
    assert "\n" not in str(caught.value)


def test_every_method_is_described_with_its_cost_and_source():
    rows = {row["name"]: row for row in describe_compressors()}
    assert len(rows) >= 19  # which ones: tests/laws/bounds.py
    assert rows["int8"]["bits_per_value"] == pytest.approx(8 + 32 / 4096, abs=1e-5)
    assert rows["topk"]["bits_per_value"] == pytest.approx(44 / 64, abs=1e-5)
    assert all(row["source"] and row["layout"] and isinstance(row["biased"], bool) for row in rows.values())


def test_a_manifest_may_name_low_rank_as_it_did_before():
    assert parse_compressor("powersgd(rank=2, iterations=4)") == parse_compressor("lowrank(rank=2)")
    assert str(parse_compressor(" powersgd ")) == "lowrank(rank=4, iterations=4)"
    assert "powersgd" not in {row["name"] for row in describe_compressors()}


def test_another_package_adds_a_method(installed):
    installed(mine="decentral.compressors.blockwise:Int8")
    assert parse_compressor("mine(block=3)") == Int8(block=3)
    assert "mine" in {row["name"] for row in describe_compressors()}


def test_another_package_cannot_replace_ours(installed):
    installed(none="decentral.compressors.blockwise:Int8")
    assert str(parse_compressor("none")) == "none"


def test_a_broken_package_spoils_only_its_own_method(installed):
    installed(gone="no_such_package:Thing", odd="math:pi")
    assert str(parse_compressor("fp16")) == "fp16"
    with pytest.raises(ConfigError, match="gone: its package does not load"):
        parse_compressor("gone")
    with pytest.raises(ConfigError, match="odd: its entry point is no dataclass that is frozen"):
        parse_compressor("odd")
