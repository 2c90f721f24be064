"""Pairs of peers that train one whole model, and what they export."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from decentral.manifest import Manifest, preset_manifest
from decentral.peer import Peer, join
from decentral.state.export import export

SETTINGS = {"listen": ("/ip4/127.0.0.1/tcp/0",), "transport": "native", "lan": False, "commands": False}


INPUTS = torch.linspace(-3.0, 5.0, 8 * 6).view(8, 6)


def terms(preset: str, **tables: dict[str, Any]) -> Manifest:
    patient = {"deadline_floor": 5.0, "deadline_ceiling": 20.0, "lease": 10.0, "shrink_after": 12.0}
    run = {"rounds": 4, "salt": "whole", **tables.pop("run", {})}
    return preset_manifest(preset, run=run, swarm=patient, inner={"steps": 4, "clip": None}, **tables)


class Trainee:
    """A model and one peer's own data, of a scale of its own."""

    def __init__(self, model: nn.Module, number: int) -> None:
        torch.manual_seed(7)
        self.model, self.number = model, number
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        self.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.003)
        self.data = torch.Generator().manual_seed(number)

    def step(self) -> None:
        inputs = 3.0 + self.number + 2.0 * torch.randn(16, 6, generator=self.data)
        (self.model(inputs) - inputs.mean()).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def says(self) -> torch.Tensor:
        self.model.eval()
        with torch.no_grad():
            answer = self.model(INPUTS)
        self.model.train()
        return answer


def joined(run: Manifest | str, trainee: Trainee, out: Path, **settings: Any) -> Peer:
    return join(run, trainee.model, trainee.optimizer, out=out, **SETTINGS, **settings, alone=True)


def exported(make: Callable[[], nn.Module], out: Path) -> torch.Tensor:
    """What the exported model says, opened in a model that was built anew."""
    to = out / "exported"
    export(out / "checkpoints", to)
    opened = Trainee(make(), 0)
    opened.model.load_state_dict(load_file(to / "model.safetensors"))
    return opened.says()


class Pair:
    """A founder and one that it invites, each training until the run is done."""

    def __init__(self, manifest: Manifest, make: Callable[[], nn.Module], folder: Path, **settings: Any) -> None:
        self.manifest, self.folder, self.settings = manifest, folder, settings
        self.trainees = [Trainee(make(), number) for number in range(2)]
        self.digests = ["", ""]
        self.invite = ""
        self.invited, self.failures = threading.Event(), list[BaseException]()

    def run(self) -> list[torch.Tensor]:
        """What both models say in the end."""
        threads = [threading.Thread(target=self._guarded, args=(number,), daemon=True) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        if self.failures:
            raise self.failures[0]
        assert self.digests[0] == self.digests[1] != ""
        return [trainee.says() for trainee in self.trainees]

    def _guarded(self, number: int) -> None:
        try:
            self._train(number)
        except BaseException as error:  # noqa: BLE001 - raised by ``run``, in the test's thread
            self.failures.append(error)
            self.invited.set()

    def _train(self, number: int) -> None:
        assert number == 0 or self.invited.wait(60)
        run = self.invite if number else self.manifest
        trainee = self.trainees[number]
        with joined(run, trainee, self.folder / str(number), **self.settings) as peer:
            if not number:
                self.invite = peer.invite
                self.invited.set()
            wait_for(lambda: len(peer.status().members) == 2)
            while not peer.done:
                trainee.step()
            self.digests[number] = peer.anchor_digest


def wait_for(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(600):
        if holds():
            return
        pause.wait(0.1)
    raise AssertionError("it did not come")


def train(peer: Peer, trainee: Trainee, rounds: int) -> None:
    while peer.round < rounds:
        trainee.step()


def assert_alike(*answers: torch.Tensor) -> None:
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0], rtol=0, atol=1e-6)
