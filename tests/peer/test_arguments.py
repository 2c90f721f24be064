"""Mistakes with ``decentral.join``: each is one sentence, and nothing was begun."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import decentral
from decentral.errors import ConfigError, DiskError
from decentral.manifest import preset_manifest

OPTIMIZER = torch.optim.AdamW(nn.Linear(4, 4).parameters())
SCHEDULE = StepLR(OPTIMIZER, 3)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def terms() -> decentral.Manifest:
    return preset_manifest("sparseloco", run={"name": "mistakes"}, model={"task": "custom"})


def test_a_peer_that_was_not_entered_does_not_say_that_it_trains_on(tmp_path: Path) -> None:
    """A loop until ``peer.done`` went on for ever, alone, without a word."""
    peer = decentral.join(terms(), *model_and_optimizer(), out=tmp_path / "run", alone=True)
    with pytest.raises(ConfigError, match=r"peer.done: this peer has not entered the run; write `with decentral.join"):
        assert peer.done
    with pytest.raises(ConfigError, match="has not entered"):
        peer.log(loss=1.0)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"require_peers": -1}, r"join\(require_peers=-1\): it is a number of peers"),
        ({"scheduler": 3}, "join: the scheduler is a int"),
        ({"scheduler": OPTIMIZER}, "the scheduler is a AdamW, which is an optimizer; pass it as optimizer"),
        ({"scheduler": StepLR}, "the scheduler is the class StepLR; pass the schedule that the loop steps"),
        ({"optimizer": "adamw"}, "join: the optimizer is a str"),
        ({"optimizer": None}, "join: the optimizer is missing; pass what the loop calls step of"),
        ({"optimizer": SCHEDULE}, r"the optimizer is a StepLR, which is a schedule; .* join\(scheduler=...\)"),
        ({"optimizer": nn.Linear(1, 1)}, "the optimizer is a Linear, which is a model"),
        ({"optimizer": list(nn.Linear(1, 1).parameters())}, "the optimizer is a Parameter; pass the optimizer that"),
        ({"optimizer": nn.Linear(1, 1).parameters()}, "the optimizer is a generator; pass the optimizer that"),
        ({"optimizer": torch.optim.AdamW}, r"the optimizer is the class AdamW; make one"),
        ({"optimizer": SimpleNamespace(lr_scheduler=None, optimizer=OPTIMIZER)}, r"callbacks=\[DecentralCallback\(run"),
        ({"model": {}}, "join: the model is a dict"),
        ({"model": None}, "join: the model is missing; pass the torch module"),
        ({"run": nn.Linear(1, 1)}, r"join: the run is a Linear; .* join\(run, model, optimizer\)"),
        ({"accelerator": True}, r"join\(accelerator=True\): give the Accelerator that prepared the model"),
        ({"out": 3}, r"join\(out=3\): give a path"),
        ({"listen": "/ip4/0.0.0.0/tcp/0"}, "give a list of multiaddrs"),
        ({"relays": None}, "give a list of multiaddrs"),
        ({"require_peers": "2"}, "it is a number of peers"),
        ({"join_timeout": "30s"}, "give seconds as a number"),
        ({"checkpoint_every": 0}, "it is a number of commits, 1 at least"),
        ({"tokens_per_step": -1}, "it is a number of tokens"),
        ({"admit": 3}, r"join\(admit=...\): a token is a word"),
        ({"observer": 3}, "pass a function of one event"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_what_is_no_model_or_optimizer_is_refused_before_anything_is_begun(
    tmp_path: Path, given: dict[str, Any], sentence: str
) -> None:
    model, optimizer = model_and_optimizer()
    arguments: dict[str, Any] = {"run": terms(), "model": model, "optimizer": optimizer, "out": tmp_path / "run"}
    with pytest.raises(ConfigError, match=sentence):
        decentral.join(**(arguments | given), alone=True)
    assert not (tmp_path / "run").exists()


def test_an_argument_that_there_is_not_is_named_with_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match=r"join\(\) has no argument max_uplaod; did you mean max_upload\?"):
        decentral.join(terms(), *model_and_optimizer(), max_uplaod="5mbit", alone=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("below", [False, True], ids=["a file", "below a file"])
def test_a_folder_that_cannot_be_is_one_sentence(tmp_path: Path, below: bool) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "run" if below else tmp_path / "file"
    with (
        pytest.raises(DiskError, match="file"),
        decentral.join(terms(), *model_and_optimizer(), out=out, quiet=True, alone=True),
    ):
        pass


def test_a_warm_up_is_judged_by_the_rate_it_goes_up_to() -> None:
    from decentral.training.inner import differences

    manifest = terms().changed(inner={"learning_rate": 1e-3})
    _, optimizer = model_and_optimizer()
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=10)
    assert optimizer.param_groups[0]["lr"] < 1e-4
    assert "learning_rate" not in [key for key, _, _ in differences(manifest.inner, [optimizer])]
    optimizer.param_groups[0]["max_lr"] = 0.5
    assert ("learning_rate", "0.001", "0.5") in differences(manifest.inner, [optimizer])
