"""What a person gets for input that cannot work: the documented exit code and one line that says what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from decentral.errors import ListenError
from decentral.manifest import load_manifest
from decentral.node import folder
from decentral.swarm.admission import MIN_TOKEN
from decentral.swarm.invite import MAX_TOKEN
from decentral.tasks.corpus import MIN_NBYTES
from tests.kit.processes import held_elsewhere

ROOT = Path(__file__).parents[2]
Run = Callable[..., Result]

MANIFEST = """
[run]
name = "test"
[outer]
method = "diloco"
[compressor]
chain = "none"
[exchange]
kind = "reduce"
"""


def manifest(old: str = "", new: str = "") -> str:
    assert old in MANIFEST
    return MANIFEST.replace(old, new)


TYPED = [
    ("satrt", 2, "no such command 'satrt'; did you mean 'start'?"),
    ("xyzzy", 2, "no such command 'xyzzy'; decentral --help lists them"),
    ("status --bogus", 2, "no such option '--bogus'"),
    ("join", 2, "missing argument 'INVITE'"),
    ("status", 2, "decentral-run: no peer has run here; name the directory it was started with by --out"),
    ("peers --out nowhere", 2, "nowhere: no peer has run here"),
    ("logs", 2, "no peer has run here"),
    ("leave", 2, "no peer has run here"),
    ("pause", 2, "no peer has run here"),
    ("export nowhere --to model", 2, "nowhere: not a run directory with checkpoints"),
    ("export . --to model", 2, ".: not a run directory with checkpoints"),
    ("identity show", 2, "no identity.key; a peer makes one at its first start"),
    ("identity import absent.key", 2, "absent.key: cannot be read"),
    ("doctor garbage", 2, "garbage is not an invite"),
    ("bench compressors --only nosuchthing", 2, "no method has that in its name; decentral compressors lists them"),
    ("bench compressors --rows 100", 2, "want a multiple of 64"),
    ("bench compressors --rows 3", 2, "3 is not in the range"),
    ("init run.toml --preset sparselco", 2, "preset 'sparselco' does not exist; did you mean sparseloco?"),
    ("init run.toml --compressor topk(k=0)", 10, "want 1 <= k <="),
    ("init run.toml --compressor tpok(k=3)", 10, "topk"),
    ("init run.toml --inner-steps 0", 2, "0 is not in the range x>=1"),
    ("init run.toml --inner-steps 5 --overlap 9", 10, "outer.overlap = 9 must be below inner.steps"),
    ("init absent/run.toml", 50, "absent/run.toml: cannot be written (No such file or directory)"),
    ("start absent.toml", 10, "absent.toml: no such manifest; write one with: decentral init absent.toml"),
    ("start run.toml --max-upload 5mb", 2, "'5mb' is no rate; write it as 20mbit or 2.5MB/s"),
    ("join garbage --max-download 9kbit", 2, "'9kbit' is too little: other peers would take this one for dead"),
    ("start run.toml --daily-upload 50", 2, "'50' is no size; write it as 50GB or 800MB"),
    ("join garbage", 2, "garbage is not an invite; an invite begins with decentral1:"),
    ("join decentral1:AAAA", 2, "cut short"),
    ("join decentral9:AAAA", 2, "made by another version of this program"),
    ("demo --algorithm sparselcoo", 2, "'sparselcoo' does not exist; did you mean sparseloco?"),
    ("demo --peers 0", 2, "0 is not in the range"),
    ("demo --minutes fast", 2, "'fast' is not a valid float"),
]

WRITTEN = [
    (manifest("[outer]", "[inner]\nsteps = 0\n[outer]"), 10, "inner.steps = 0"),
    (manifest("[outer]", "[inner]\nsteps = -3\n[outer]"), 10, "inner.steps = -3"),
    (manifest("[outer]", "[inner]\nstep = 3\n[outer]"), 10, "unknown key inner.step; did you mean steps?"),
    (manifest("[outer]", "[iner]\nsteps = 3\n[outer]"), 10, "unknown table iner; did you mean inner?"),
    (manifest("[outer]", "[outr]"), 10, "unknown table outr; did you mean outer? (and 1 more)"),
    (manifest('"diloco"', '"dilocoo"'), 10, "diloco"),
    (manifest('"none"', '"topk(k=9000, chunk=4096)"'), 10, "want 1 <= k <= 4096"),
    (manifest('"reduce"', '"pair"'), 10, "does not fit outer.method diloco"),
    (manifest("[compressor]", "[compressor]\nfeedback = 'ef(beta=1.5)'"), 10, "debt's decay"),
    ("this is not TOML", 10, "not TOML"),
    ("", 10, "missing"),
]


def one_line(result: Result, code: int, fragment: str) -> None:
    assert result.exit_code == code, result.stderr
    assert "Traceback" not in result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert fragment in line
    assert result.stdout == ""


@pytest.mark.parametrize(("typed", "code", "fragment"), TYPED, ids=[row[0] for row in TYPED])
def test_a_command_that_cannot_work_is_answered_in_one_line(run: Run, typed: str, code: int, fragment: str) -> None:
    arguments = typed.split(" ")
    one_line(run(*arguments), code, fragment)


@pytest.mark.parametrize(("text", "code", "fragment"), WRITTEN, ids=[row[2] for row in WRITTEN])
def test_a_manifest_that_cannot_work_is_answered_in_one_line(
    run: Run, tmp_path: Path, text: str, code: int, fragment: str
) -> None:
    (tmp_path / "run.toml").write_text(text)
    one_line(run("start", "run.toml"), code, fragment)


def test_an_existing_manifest_is_not_written_over(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("mine")
    one_line(run("init", "run.toml"), 2, "run.toml exists; --force writes over it")
    assert (tmp_path / "run.toml").read_text() == "mine"


def test_a_run_on_other_data_asks_for_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(manifest("[outer]", '[data]\ncorpus = "my novel"\n[outer]'))
    result = run("start", "run.toml", "--solo")
    assert result.exit_code == 30
    assert result.stderr.splitlines()[-1] == (
        "error: the run trains on my novel; name your copy of it with --data PATH"
    )


@pytest.mark.parametrize(("size", "fragment"), [(None, "cannot be read"), (100, "holds 100 bytes of text")])
def test_data_that_is_missing_or_too_small_is_exit_code_30(
    run: Run, tmp_path: Path, size: int | None, fragment: str
) -> None:
    (tmp_path / "run.toml").write_text(manifest("[outer]", '[data]\ncorpus = "mine"\n[outer]'))
    if size is not None:
        (tmp_path / "text").write_text("x" * size)
    result = run("start", "run.toml", "--solo", "--data", "text")
    assert result.exit_code == 30
    assert fragment in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.output


def test_a_custom_model_is_sent_to_the_python_interface(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(manifest("[outer]", '[model]\ntask = "custom"\n[outer]'))
    one_line(run("start", "run.toml", "--solo"), 10, "the run has a script of its own, which python starts")


def test_the_terms_of_a_custom_model_name_a_script_as_the_next_step(run: Run, tmp_path: Path) -> None:
    result = run("init", "run.toml", "--task", "custom")
    assert result.stdout.splitlines()[-1].endswith(
        'train your own model with it, in a script: decentral.join("run.toml", model, optimizer)'
    )
    assert 'task = "custom"' in (tmp_path / "run.toml").read_text()
    assert (
        load_manifest(tmp_path / "run.toml").inner.weight_decay
        == torch.optim.AdamW([torch.zeros(1)]).defaults["weight_decay"]
    )
    (tmp_path / "text").write_text("the quick brown fox. " * 5000)
    refused = run("init", "new.toml", "--task", "custom", "--data", "text")
    one_line(refused, 2, "--data is text for causal-lm; with --task custom a script reads its own")


def test_a_directory_that_cannot_be_made_is_exit_code_50(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(MANIFEST)
    (tmp_path / "file").write_text("")
    one_line(run("start", "run.toml", "--out", "file/run"), 50, "file/run: cannot be made (Not a directory)")


def test_a_directory_with_a_running_peer_is_refused(run: Run, tmp_path: Path, running_peer: Path) -> None:
    (tmp_path / "run.toml").write_text(MANIFEST)
    one_line(run("start", "run.toml", "--out", running_peer), 2, "a peer runs here already (process")


def test_a_start_that_another_was_faster_than_leaves_what_that_one_has_just_made(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text(MANIFEST)
    out, take = tmp_path / "decentral-run", folder._take_lock

    def while_the_other_begins(*arguments: Any) -> None:
        (out / "identity.key").write_text("of the other")
        take(*arguments)

    monkeypatch.setattr(folder, "_take_lock", while_the_other_begins)
    with held_elsewhere(out):
        one_line(run("start", "run.toml", "--solo"), 2, "decentral-run: a peer begins here just now; choose another")
    assert (out / "identity.key").read_text() == "of the other"


def test_a_foreign_directory_is_not_emptied_by_a_demo(run: Run, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.png").write_text("meow")
    one_line(run("demo", "--out", "photos"), 2, "photos is not empty and no earlier demo made it")
    assert (tmp_path / "photos/cat.png").exists()


def test_what_init_reads_of_a_folder_and_what_it_passes_over_is_said(run: Run, tmp_path: Path) -> None:
    (tmp_path / "foxes").mkdir()
    (tmp_path / "foxes/fox.txt").write_text("the quick brown fox. " * 5000)
    (tmp_path / "foxes/fox.png").write_bytes(bytes(1000))
    result = run("init", "run.toml", "--data", "foxes")
    assert result.exit_code == 0
    passed = "1 file of 1,000 bytes passed over, fox.png: zero bytes near the beginning, so no text"
    assert result.stderr.startswith(f"data    foxes: 1 file ({passed}), 105,000 bytes, 100.0 % of it text, digest ")


def test_the_bounds_of_what_is_typed_are_in_the_documents() -> None:
    running, transports = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("docs/running.md", "docs/transports.md")
    )
    said = " ".join(running.split())
    assert f"at least {MIN_NBYTES // 1024} KiB" in said
    assert f"the token, {MIN_TOKEN} to {MAX_TOKEN} visible characters" in said
    assert f"ends with exit code {ListenError.exit_code} before anything is made" in " ".join(transports.split())
