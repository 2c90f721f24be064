"""Every example of the folder, in a swarm of two."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from decentral.cli import main
from decentral.observe.status import Status, read_status
from decentral.state.export import export
from decentral.swarm.invite import Invite
from tests.examples import own_package
from tests.examples.two_peers import EXAMPLES, ROOT, FirstPeers, first_peers, run_example
from tests.kit import outside
from tests.kit.patience import PATIENCE


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    own_package.install(folder)
    return folder


@pytest.fixture(scope="module")
def first(packages: Path) -> Iterator[FirstPeers]:
    with first_peers(packages) as process:
        yield process


def check_agreed(ends: list[Status], rounds: int) -> None:
    one, other = ends
    assert one.anchor_digest == other.anchor_digest != ""
    assert [one.round, other.round] == [rounds, rounds]
    assert other.rounds_contributed > 0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")  # a Trainer without a GPU
def test_two_trainers_end_with_the_same_model(first, tmp_path):
    check_agreed(first.swarm_of_two("trainer.py", tmp_path, "--rounds", "3"), 3)
    models = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("first", "second")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.long
def test_a_network_with_batchnorm_learns_digits(first, tmp_path, capsys):
    pytest.importorskip("sklearn")
    check_agreed(first.swarm_of_two("images.py", tmp_path, "--rounds", "5"), 5)
    said = capsys.readouterr().out.splitlines()[-1]
    assert float(said.split("%")[0]) > 80


@pytest.mark.long
def test_a_peer_of_two_processes_trains_with_one_of_a_single_process(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} and {n + 1} and " for n in range(1000)), encoding="utf-8")
    outs = [tmp_path / "first", tmp_path / "second"]
    said = tmp_path / "said"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--multi_gpu", "--main_process_port", "0"]
    given = ["--text", str(text), "--rounds", "8"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    with (
        said.open("w") as log,
        subprocess.Popen(
            [*launch, str(EXAMPLES / "fsdp.py"), *given, "--out", str(outs[0])], env=environment, stdout=log, stderr=log
        ) as process,
    ):
        try:
            while (found := re.search(r"decentral join (\S+)", said.read_text())) is None:
                assert process.poll() is None, said.read_text()
                subprocess.run(["sleep", "0.1"], check=True)
            run_example(EXAMPLES / "fsdp.py", [*given, "--out", str(outs[1])], {"run": found[1], "out": outs[1]})
            assert process.wait(PATIENCE) == 0, said.read_text()
        finally:
            process.terminate()
    check_agreed([read_status(out) for out in outs], 8)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks transformers for it
def test_of_a_model_folder_only_the_adapters_travel(first, tmp_path, tiny_folder):
    pytest.importorskip("peft")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} and {n + 1} and " for n in range(400)), encoding="utf-8")
    given = ["--model", str(tiny_folder), "--text", str(text), "--rounds", "3"]
    ends = first.swarm_of_two("lora.py", tmp_path, *given)
    check_agreed(ends, 3)
    adapters = [load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("first", "second")]
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    assert all("lora_" in name for name in adapters[0])
    exported = tmp_path / "exported"
    export(tmp_path / "second/checkpoints", exported)
    written = [load_file(folder / "adapter_model.safetensors") for folder in (exported, tmp_path / "second/adapter")]
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(written[0][name], written[1][name]) for name in written[0])
    kinds = [
        json.loads((folder / "adapter_config.json").read_text()) for folder in (exported, tmp_path / "second/adapter")
    ]
    assert kinds[0] == kinds[1] | {"target_modules": sorted(kinds[1]["target_modules"])}
    base = (tiny_folder / "model.safetensors").stat().st_size
    assert sum(end.bytes_per_round for end in ends) / 2 < base / 10


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Lightning warns of its own imports, and of a loader with one worker
def test_two_trainers_of_lightning_end_with_the_same_anchor(first, tmp_path):
    pytest.importorskip("lightning")
    check_agreed(first.swarm_of_two("fit_lightning.py", tmp_path, "--rounds", "5"), 5)


@pytest.mark.long
def test_a_package_of_ones_own_adds_a_compressor_and_a_method(first, packages, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(packages))
    check_agreed(first.swarm_of_two("own_package/train.py", tmp_path, "--rounds", "5"), 5)


def test_a_method_of_the_package_is_a_preset_like_any_other(packages, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(packages))
    made = CliRunner().invoke(main, ["init", str(tmp_path / "run.toml"), "--preset", "outer_lion"])
    assert made.exit_code == 0, made.output
    assert 'method = "outer_lion"' in (tmp_path / "run.toml").read_text()
    assert "outer_lion" in CliRunner().invoke(main, ["optimizers"]).stdout
    assert (
        "did you mean outer_lion?" in CliRunner().invoke(main, ["init", "--preset", "outer_lio", "other.toml"]).stderr
    )


@pytest.mark.long
def test_what_the_package_adds_obeys_every_law(packages):
    compressors = ["--compressor", "coarse(levels=7)", "--compressor", "topk(k=64, chunk=4096) >> coarse"]
    assert outside.laws(packages, *compressors, "--outer", "outer_lion") >= 130


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["own_loop.py", "trainer.py", "fit_lightning.py"])
def test_an_example_that_is_interrupted_after_its_invite_goes_on_with_its_run(name, packages, tmp_path):
    """Each makes its terms itself, and so draws another salt."""
    runs = list[str]()
    for _ in range(2):
        with first_peers(packages) as first:
            runs.append(Invite.parse(first.begin(name, tmp_path, "--rounds", "3")).run.hex())
            first.interrupt()
        assert read_status(tmp_path).state == "left"
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["resumed"] for event in events if event["event"] == "joined"] == [False, True]
    assert runs[0] == runs[1] == read_status(tmp_path).run_id


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of the notebook's own machinery
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(outside.ROOT))
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    where = next(cell for cell in notebook.cells if "ALONE = False" in cell.source)
    where.source = where.source.replace("ALONE = False", "ALONE = True")
    nbclient.NotebookClient(notebook, timeout=int(PATIENCE), resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.get("text", "") for output in said if output.output_type == "stream")
    assert "decentral1:" in printed
    assert "round 20," in printed
    assert any("image/png" in output.get("data", {}) for output in said)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tools", [os.environ["PATH"], ""], ids=["namespaces, where they can be", "loopback"])
def test_three_small_machines_are_one_replica_and_nothing_of_theirs_stays(tools: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": tools, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, EXAMPLES / "small_machines.py", "--rounds", "8", "--out", tmp_path / "run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [n for n in range(1, 4) if f"stage {n} of 3" in done.stderr] == [1, 2, 3], done.stderr
    ends = [read_status(tmp_path / "run" / name) for name in ("large", "small0", "small1", "small2")]
    assert len({end.anchor_digest for end in ends}) == 1
    assert "decentral" not in " ".join(os.listdir("/run/netns") if Path("/run/netns").exists() else [])


def test_a_study_of_ones_own_takes_less_than_thirty_lines_and_gives_its_table(tmp_path):
    script = EXAMPLES / "own_study.py"
    assert sum(bool(line.strip()) for line in script.read_text().splitlines()) < 30
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("12 of 12 cells")], "the progress"
    rows = [line.split(" | ") for line in done.stdout.splitlines() if "learning rate" in line and "|" in line[:2]]
    assert [row[0] for row in rows] == ["| HeavyBall", "| diloco", "| data-parallel (reference)", "| alone (reference)"]
    assert all("±" in row[2] for row in rows), "three seeds"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # as above
def test_the_same_in_a_notebook_shows_a_bar_and_a_table(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(outside.ROOT))
    text = (EXAMPLES / "own_study.py").read_text().replace("print(table)", "table")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text)])
    nbclient.NotebookClient(notebook, timeout=int(PATIENCE), resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = "".join(output.get("data", {}).get("text/html", "") for output in notebook.cells[0].outputs)
    assert "12 of 12 cells" in shown
    assert shown.count("<tr>") == 5
