"""Whatever is wrong with a manifest is one line that says where, what and what to do."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decentral.errors import ConfigError
from decentral.manifest import load_manifest, parse_manifest

GOOD = """\
[run]
name = "small"
[model]
hidden = 64
heads = 4
[inner]
steps = 30
learning_rate = 1e-3
[outer]
method = "sparseloco"
[compressor]
chain = "topk(k=64, chunk=4096) >> signmag2"
feedback = "ef(beta=0.95)"
[exchange]
kind = "gather"
[swarm]
deadline_floor = 2.0
"""


def one_line(error: ConfigError) -> str:
    text = str(error)
    assert text.isprintable(), text
    assert len(text) < 400
    return text


@pytest.mark.parametrize(
    ("good", "bad", "complaint"),
    [
        ("steps = 30", "stepz = 30", r"unknown key inner.stepz; did you mean steps\?"),
        ("steps = 30", "xyzzy = 30", r"unknown key inner.xyzzy; known: steps, learning_rate"),
        ("[inner]", "[iner]", r"unknown table iner; did you mean inner\?"),
        ("steps = 30", "steps = 0", r"inner.steps = 0: input should be greater than or equal to 1; steps means: H"),
        ("steps = 30", "steps = -5", r"inner.steps = -5"),
        ("steps = 30", 'steps = "30"', r"inner.steps = '30': input should be a valid integer"),
        ("steps = 30", "steps = 30.0", r"inner.steps = 30.0: input should be a valid integer"),
        ("steps = 30", "steps = true", r"inner.steps = True: input should be a valid integer"),
        ("steps = 30", "steps = [30]", r"inner.steps = \[30\]"),
        ("steps = 30", "steps = ", r"not TOML: Invalid value \(at line 7, column 9\)"),
        ("steps = 30", "steps = 30\nsteps = 31", r"not TOML: .*\(at line 8"),
        ("steps = 30", "steps = " + "9" * 5000, r"not TOML: "),
        ("1e-3", "inf", r"inner.learning_rate = inf: input should be a finite number"),
        ("1e-3", "nan", r"inner.learning_rate = nan"),
        ("1e-3", "0", r"inner.learning_rate = 0"),
        ("1e-3", "false", r"inner.learning_rate = False: input should be a valid number"),
        ('"ef(beta=0.95)"', "0.95", r"compressor.feedback = 0.95: input should be a valid string"),
        ('kind = "gather"', 'kind = "gathr"', r"exchange.kind = 'gathr': input should be 'gather', 'reduce' or 'pair'"),
        ('kind = "gather"', "", r"exchange.kind is missing; kind means: gather: all to all"),
        ('[exchange]\nkind = "gather"', "", r"exchange is missing; add the table \[exchange\]"),
        ('name = "small"', 'name = "../etc"', r"run.name = '../etc': has characters that do not belong"),
        ('name = "small"', 'name = "a\\nb"', r"run.name = 'a\\nb': has characters that do not belong"),
        ('name = "small"', f'name = "{"a" * 65}"', r"run.name = .*\.\.\.: has characters .*, or too many"),
        ("heads = 4", "heads = 3", r"model: hidden = 64 must be a multiple of 2 \* heads = 6"),
        ("heads = 4", "heads = 4\nlayers = 0", r"model.layers = 0"),
        ('"sparseloco"', '"sparseloco"\noverlap = 30', r"outer.overlap = 30 must be below .* = 30, or a fragment"),
        ('"sparseloco"', '"sparseloco"\noverlap = 15\nfragments = 2', r"outer.overlap = 15 must be below .* = 15"),
        (
            '"sparseloco"',
            '"sparseloco"\nfragments = 31',
            r"inner.steps = 30 is no multiple of outer.fragments = 31.*; take 31",
        ),
        ("deadline_floor = 2.0", "deadline_floor = 90.0", r"swarm: deadline_floor = 90.0 is above deadline_ceiling"),
        ("deadline_floor = 2.0", "lease = 90.0", r"swarm: lease = 90.0 is above shrink_after"),
        ("[swarm]", "[[swarm]]", r"swarm = "),
    ],
)
def test_what_is_wrong_is_said_in_one_line(good: str, bad: str, complaint: str) -> None:
    assert good in GOOD
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_manifest(GOOD.replace(good, bad))
    assert one_line(caught.value).startswith("manifest: ")


def test_several_faults_are_counted() -> None:
    with pytest.raises(ConfigError, match=r"\(and 1 more\)"):
        parse_manifest(GOOD.replace("steps = 30", "steps = 0\nwarmup = -1"))


def test_a_good_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(GOOD, encoding="utf-8")
    assert load_manifest(path) == load_manifest(str(path)) == parse_manifest(GOOD)


def test_a_byte_order_mark_and_windows_line_ends_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_manifest(path).digest == parse_manifest(GOOD).digest


@pytest.mark.parametrize(
    ("good", "bad", "complaint"),
    [
        ("topk(k=64", "topq(k=64", "did you mean topk"),
        ("k=64", "k=0", "topk"),
        ("k=64", "k=5000", "topk"),
        ('"sparseloco"', '"sparselocco"', "did you mean sparseloco"),
        ('"sparseloco"', '"sparseloco"\nmomentum = 0.9', "unknown key outer.momentum"),
        ('"sparseloco"', '"noloco"', 'exchange.kind = "gather" does not fit outer.method noloco; use "pair"'),
        ('"gather"', '"pair"', 'exchange.kind = "pair" does not fit outer.method sparseloco; use "gather" or "reduce"'),
    ],
)
def test_a_file_with_methods_that_do_not_exist_or_fit_is_refused(
    tmp_path: Path, good: str, bad: str, complaint: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(GOOD.replace(good, bad), encoding="utf-8")
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_manifest(path)
    assert one_line(caught.value).startswith(f"{path}: ")


def test_a_missing_file_says_how_to_write_one(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    with pytest.raises(ConfigError, match=r"No such file or directory\); write one with: decentral init"):
        load_manifest(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_manifest(tmp_path)


def test_a_file_that_is_no_text_or_far_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"name = \xff")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_manifest(path)
    path.write_bytes(b"#" * 70_000)
    with pytest.raises(ConfigError, match="longer than 65536 bytes"):
        load_manifest(path)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        parse_manifest("a = " + "[" * 30_000)


TOML_PIECES = st.sampled_from(
    ["[run]", "[inner]", "[[outer]]", "name", "steps", " = ", "\n", '"x"', "1", "-0.0", "nan", "{", "}", "[", "]", ",",
     "1979-05-27", '"\\u0000"', "é", "run.name", "'", "true", "\x1b"]
)  # fmt: skip


@given(st.lists(TOML_PIECES, max_size=30).map("".join) | st.text(max_size=60))
@settings(max_examples=250, deadline=None)
def test_any_text_ends_in_one_printable_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifest(text)
    one_line(caught.value)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_mutated_manifest_is_read_or_refused_in_one_line(data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(GOOD)))
    cut = data.draw(st.integers(0, 5))
    text = GOOD[:position] + data.draw(st.text(max_size=5)) + GOOD[position + cut :]
    try:
        manifest = parse_manifest(text)
    except ConfigError as error:
        one_line(error)
    else:
        assert parse_manifest(manifest.to_toml()).digest == manifest.digest


def test_importing_the_manifest_wire_and_identity_loads_no_torch() -> None:
    code = (
        "import sys, decentral.manifest, decentral.wire.messages, decentral.wire.frames, decentral.swarm.identity, "
        "decentral.swarm.invite; raise SystemExit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
