"""`decentral generate` and `decentral evaluate`, of a run directory and of the folder that export makes of it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from decentral.cli.model import _HARMLESS, _make_printer, _text
from decentral.tasks.evaluate import continue_text
from decentral.tasks.trained_model import open_trained
from tests.cli.conftest import Run
from tests.kit.exports import kept, small_model


def text_file(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("the swarm agrees on one small update. " * 2000, encoding="utf-8")
    return path


@pytest.mark.parametrize("experts", [None, 4])
def test_a_run_and_what_is_exported_of_it_go_on_alike(run: Run, tmp_path: Path, experts: int | None) -> None:
    kept(tmp_path / "run", small_model(experts), "causal-lm")
    assert run("export", "run", "--to", "model").exit_code == 0
    typed = ("--prompt", "def ", "--tokens", 60)  # more than the model sees at once
    said = [run("generate", name, *typed) for name in ("run", "model")]
    assert [one.exit_code for one in said] == [0, 0], said
    assert said[0].stdout == said[1].stdout
    assert said[0].stdout.startswith("def ")
    told = json.loads(run("generate", "run", *typed, "--json").stdout)
    assert told["prompt"] + told["text"].translate(_HARMLESS) + "\n" == said[0].stdout
    assert told["tokens"] == 60


def test_the_seed_and_the_temperature_decide_what_is_drawn(run: Run, tmp_path: Path) -> None:
    kept(tmp_path / "run", small_model(), "causal-lm")

    def drawn(*options: object) -> str:
        return str(json.loads(run("generate", "run", "--prompt", "a", "--json", *options).stdout)["text"])

    assert drawn("--seed", 1) == drawn("--seed", 1) != drawn("--seed", 2)
    assert drawn("--temperature", 0) == drawn("--temperature", 0, "--seed", 2)


def test_what_a_terminal_would_obey_is_shown_as_a_sign(capsys: pytest.CaptureFixture[str]) -> None:
    tell = _make_printer()
    tell("a\x1b[2J")
    tell("a\x1b[2J\tb\n")
    assert capsys.readouterr().out == "a\N{REPLACEMENT CHARACTER}[2J\tb\n"


def test_a_model_that_counts_goes_on_counting() -> None:
    class Counts(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> object:
            self.seen = input_ids.shape[1]
            return type("Output", (), {"logits": nn.functional.one_hot((input_ids + 1) % 10, 10) * 9.0})

    counts = Counts()
    given = {"num_tokens": 12, "context": 4, "temperature": 0.0, "generator": torch.Generator()}
    assert list(continue_text(counts, torch.tensor([7]), **given)) == [8, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert counts.seen == 4


def test_an_untrained_model_is_evaluated_at_eight_bits_a_byte(run: Run, tmp_path: Path) -> None:
    kept(tmp_path / "run", small_model(), "causal-lm")
    run("export", "run", "--to", "model")
    told = [
        json.loads(run("evaluate", name, "--data", text_file(tmp_path), "--json").stdout) for name in ("run", "model")
    ]
    assert told[0]["bits_per_byte"] == pytest.approx(8, abs=0.2)
    assert told[0]["bits_per_byte"] == told[1]["bits_per_byte"]
    assert told[0]["nats_per_token"] == pytest.approx(told[0]["bits_per_byte"] * math.log(2))
    assert told[0]["text"].startswith("the last 5 % of --data ")
    whole = run("evaluate", "run", "--data", text_file(tmp_path), "--all")
    assert "bits per byte" in whole.stdout
    assert "the last" not in whole.stdout


def test_all_of_a_text_is_what_is_trained_on_and_what_is_held_out_of_it(tmp_path: Path) -> None:
    path = text_file(tmp_path)
    kept(tmp_path / "run", small_model(), "causal-lm")
    text_N, _ = _text(open_trained(tmp_path / "run"), path, whole=True)
    assert bytes(text_N.tolist()) == path.read_bytes()


def test_without_transformers_the_built_in_model_is_opened_and_another_names_the_extra(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(tmp_path / "run", small_model(), "causal-lm")
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    kept(tmp_path / "theirs", GPT2LMHeadModel(GPT2Config(vocab_size=256, **sizes)), "custom")
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name, to in (("run", "model"), ("theirs", "their-model")):
        assert run("export", name, "--to", to).exit_code == 0
    for name in ("run", "model"):
        assert run("evaluate", name, "--data", text_file(tmp_path)).exit_code == 0
        assert run("generate", name, "--prompt", "a", "--tokens", 2).exit_code == 0
    for name in ("theirs", "their-model"):
        refused = run("generate", name, "--prompt", "a", "--tokenizer", "model")
        assert refused.exit_code == 2
        assert refused.stderr == f"error: {name} takes transformers to open; pip install 'decentral[transformers]'\n"


def test_a_scripts_transformers_model_needs_its_tokenizer(run: Run, tmp_path: Path) -> None:
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    kept(tmp_path / "run", GPT2LMHeadModel(GPT2Config(vocab_size=256, **sizes)), "custom")
    refused = run("generate", "run", "--prompt", "a")
    assert refused.exit_code == 2
    assert "name its folder with --tokenizer" in refused.stderr
    kept(tmp_path / "ours", small_model(), "causal-lm")
    run("export", "ours", "--to", "bytes")
    assert run("generate", "run", "--prompt", "a", "--tokenizer", "bytes").exit_code == 0
    told = json.loads(run("evaluate", "run", "--data", text_file(tmp_path), "--tokenizer", "bytes", "--json").stdout)
    assert told["bits_per_byte"] == pytest.approx(8, abs=0.2)
