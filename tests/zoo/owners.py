"""Optimizers that own the weights: copies of them, or older ones, which they write over the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.harness import Script, loop, mlp, regression

KIND = "optimizers that own the weights"
APART = {"outer": {"preset": "local_sgd"}, "inner": {"learning_rate": 0.05}}


def pulled_apart(script: Script, model: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    """A loss that pulls the two peers in opposite directions: a step that undoes a commit goes far."""
    x = script.randn(32, 8).to(dtype)
    y = x.float().sum(1, keepdim=True) * (1 - 2 * script.number)
    return (model(x).float() - y).square().mean()


class MasterCopies(torch.optim.Optimizer):
    """As fairseq's and Apex's FP16_Optimizer: the optimizer steps float32 copies, and copies them into the model."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(list(params), {"lr": lr})
        self.fp32 = {p: p.detach().float().clone() for group in self.param_groups for p in group["params"]}
        self.inner = torch.optim.SGD(list(self.fp32.values()), lr)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for p, copy in self.fp32.items():
            copy.grad = p.grad.float()
        self.inner.step()
        for p, copy in self.fp32.items():
            p.copy_(copy)


@loop(KIND, "facebookresearch/fairseq fp16_optimizer.py", **APART)
def master_copies(script: Script) -> None:
    model = nn.Linear(8, 1).to(torch.bfloat16)
    optimizer = MasterCopies(model.parameters(), lr=0.05)

    script.train(model, optimizer, lambda: pulled_apart(script, model, torch.bfloat16))


class LookaheadAround:
    """As alphadl/lookahead.pytorch's: it has the optimizer that it steps under ``optimizer``, as accelerate does."""

    def __init__(self, optimizer: torch.optim.Optimizer, la_steps: int = 5, la_alpha: float = 0.5) -> None:
        self.optimizer, self._la_step, self.la_alpha, self._total_la_steps = optimizer, 0, la_alpha, la_steps
        self.param_groups, self.state_dict = optimizer.param_groups, optimizer.state_dict
        self.load_state_dict, self.zero_grad = optimizer.load_state_dict, optimizer.zero_grad
        self.cached = {p: p.data.clone() for group in optimizer.param_groups for p in group["params"]}

    def step(self) -> None:
        self.optimizer.step()
        self._la_step += 1
        if self._la_step >= self._total_la_steps:
            self._la_step = 0
            for p, cached in self.cached.items():
                p.data.mul_(self.la_alpha).add_(cached, alpha=1.0 - self.la_alpha)
                cached.copy_(p.data)


@loop(KIND, "alphadl/lookahead.pytorch", **APART)
def lookahead_around(script: Script) -> None:
    model = nn.Linear(8, 1)
    optimizer = LookaheadAround(torch.optim.SGD(model.parameters(), lr=0.05))

    script.train(model, optimizer, lambda: pulled_apart(script, model))


class FP16Optimizer:
    """As NVIDIA/apex's: around an optimizer whose groups it has filled with float32 copies."""

    def __init__(self, init_optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.pairs = init_optimizer, list[tuple[Tensor, Tensor]]()
        for group in init_optimizer.param_groups:
            masters = [p.detach().clone().float().requires_grad_(True) for p in group["params"]]
            self.pairs += zip(group["params"], masters, strict=True)
            group["params"] = masters
        self.param_groups, self.state_dict = init_optimizer.param_groups, init_optimizer.state_dict

    @torch.no_grad()
    def step(self) -> None:
        for p, master in self.pairs:
            master.grad = p.grad.float()
        self.optimizer.step()
        for p, master in self.pairs:
            p.copy_(master)


@loop(KIND, "NVIDIA/apex fp16_utils FP16_Optimizer", refused="holds none of the model's")
def fp16_optimizer(script: Script) -> None:
    model = nn.Linear(8, 1).to(torch.bfloat16)
    optimizer = FP16Optimizer(torch.optim.SGD(model.parameters(), lr=0.05))

    script.train(model, optimizer, lambda: pulled_apart(script, model, torch.bfloat16))


@loop(KIND, "torch.optim.swa_utils, as its documentation writes it", learns=True, long=True)
def swa(script: Script) -> None:
    """An averaged model beside the one that is joined, a schedule of its own, and update_bn at the end."""
    from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    swa_model = AveragedModel(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    swa_scheduler = SWALR(optimizer, swa_lr=0.02)
    with script.join(model, optimizer, scheduler=[scheduler, swa_scheduler]) as peer:
        loader = [script.randn(16, 8) for _ in range(2)]
        for epoch in range(100):
            if peer.done:
                break
            for x in loader:
                script.rand(1)
                optimizer.zero_grad()
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                loss.backward()
                optimizer.step()
                script.losses.append(loss.item())
                if peer.done:
                    break
            if epoch > 2:
                swa_model.update_parameters(model)
                swa_scheduler.step()
            else:
                scheduler.step()
        update_bn(loader, swa_model)


class AdamW8bit(torch.optim.Optimizer):
    """As bitsandbytes': moments are held in blocks of bytes, each with its largest value."""

    def __init__(self, params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    for name in ("state1", "state2"):
                        state[name] = torch.zeros_like(p, dtype=torch.int8)
                        state["absmax" + name[-1]] = torch.zeros(())
                state["step"] += 1
                for name, beta, value in (("1", group["betas"][0], p.grad), ("2", group["betas"][1], p.grad.square())):
                    now = state["state" + name].float() / 127 * state["absmax" + name]
                    now.lerp_(value, 1 - beta)
                    state["absmax" + name] = now.abs().max()
                    state["state" + name] = (now / (state["absmax" + name] + 1e-12) * 127).round().to(torch.int8)
                first = state["state1"].float() / 127 * state["absmax1"] / (1 - group["betas"][0] ** state["step"])
                second = state["state2"].float() / 127 * state["absmax2"] / (1 - group["betas"][1] ** state["step"])
                p.sub_(group["lr"] * first / (second.clamp(min=0).sqrt() + 1e-2))


@loop(KIND, "bitsandbytes AdamW8bit, written out", learns=True, long=True)
def adamw_of_eight_bits(script: Script) -> None:
    model = mlp(8, 16, 1)
    regression(script, model, AdamW8bit(model.parameters(), lr=2e-2))
