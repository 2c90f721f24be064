"""Makes torchft_diloco.safetensors with torchft's own classes: ``pip install torchft==0.2.0``, then run this file.

Two replicas in lockstep, each on a thread, their all-reduce a barrier; the inner optimizer is SGD with gradients drawn
from a seed. By case and round: where each replica's parameters were when they were sent (``sent``), and when the outer
step had been merged (``merged``); with a delay they train on in between (``live``).
"""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

REPLICAS, ROUNDS, STEPS, RATE = 2, 6, 4, 0.05
CASES = {"diloco": (1, 0, 0.0), "streaming": (2, 1, 0.5)}  # fragments, delay, alpha


class Together:
    """The managers of all replicas: their all-reduce averages what each gives."""

    def __init__(self) -> None:
        self.barrier, self.given = threading.Barrier(REPLICAS), [torch.zeros(0)] * REPLICAS

    def average(self, replica: int, tensor: Tensor) -> None:
        self.given[replica] = tensor.clone()
        self.barrier.wait()
        tensor.copy_(torch.stack(self.given).mean(0))
        self.barrier.wait()


class Work:
    def wait(self) -> bool:
        return True


class Manager:
    _use_async_quorum = False

    def __init__(self, together: Together, replica: int) -> None:
        self.together, self.replica, self.step = together, replica, 0

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> Work:
        self.together.average(self.replica, tensor)
        return Work()

    def should_commit(self) -> bool:
        self.step += 1
        return True

    def current_step(self) -> int:
        return self.step

    def __getattr__(self, name: str) -> object:  # the rest of what a manager is told changes nothing here
        return lambda *_, **__: None


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(case: str, replica: int, together: Together, found: dict[str, Tensor]) -> None:
    fragments, delay, alpha = CASES[case]
    torch.manual_seed(7)
    parts = [nn.Linear(5, 6) for _ in range(fragments)]
    inner = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=RATE)
    outer = [torch.optim.SGD(p.parameters(), lr=0.7, momentum=0.9, nesterov=True) for p in parts]
    random = torch.Generator().manual_seed(replica)
    options = {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
    for f, part in enumerate(parts):
        found[f"{case}/start/{f}"] = flat(part)
    with DiLoCo(Manager(together, replica), parts, inner, outer, STEPS * fragments, **options):
        for number in range(ROUNDS * fragments):
            part = parts[number % fragments]
            for step in range(STEPS):
                for p in inner.param_groups[0]["params"]:
                    p.grad = torch.randn(p.shape, generator=random)
                gradient = torch.cat([p.grad.flatten() for p in part.parameters()])
                before = flat(part)
                inner.step()
                if step == STEPS - delay - 1:
                    found[f"{case}/{number}/sent/{replica}"] = before - RATE * gradient
                if step == STEPS - 1:
                    found[f"{case}/{number}/live/{replica}"] = before - RATE * gradient
            found[f"{case}/{number}/merged/{replica}"] = flat(part)


def main() -> None:
    found: dict[str, Tensor] = {}
    for case in CASES:
        together = Together()
        threads = [threading.Thread(target=train, args=(case, n, together, found)) for n in range(REPLICAS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    save_file(found, Path(__file__).parents[1] / "torchft_diloco.safetensors")


if __name__ == "__main__":
    main()
