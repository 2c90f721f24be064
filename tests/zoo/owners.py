"""Optimizers that own the weights: copies of them, or older ones, which they write over the model."""

from __future__ import annotations

from collections import defaultdict

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
    with script.join(model, optimizer) as peer:
        while not peer.done:
            optimizer.zero_grad()
            pulled_apart(script, model, torch.bfloat16).backward()
            optimizer.step()


class Offloaded(torch.optim.Optimizer):
    """As torchao's CPUOffloadOptimizer: one optimizer for each parameter, of its copy on another device."""

    def __init__(self, params, optimizer_class, **kwargs) -> None:
        params = list(params)
        super().__init__(params, kwargs)
        self.param_d2h_map = {p: p.detach().clone().requires_grad_(True) for p in params}
        self.optim_dict = {p: optimizer_class([{"params": [h]}], **kwargs) for p, h in self.param_d2h_map.items()}

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for p, host in self.param_d2h_map.items():
            host.grad = p.grad.clone()
            self.optim_dict[p].step()
            p.copy_(host, non_blocking=True)


@loop(KIND, "pytorch/ao CPUOffloadOptimizer", **APART)
def cpu_offload(script: Script) -> None:
    model = nn.Linear(8, 1)
    optimizer = Offloaded(model.parameters(), torch.optim.SGD, lr=0.05)
    with script.join(model, optimizer) as peer:
        while not peer.done:
            pulled_apart(script, model).backward()
            optimizer.step()
            optimizer.zero_grad()


class Lookahead(torch.optim.Optimizer):
    """As lonePatient's and timm's: slow weights in the state, which every k-th step goes half of the way from."""

    def __init__(self, base_optimizer: torch.optim.Optimizer, alpha: float = 0.5, k: int = 6) -> None:
        super().__init__(base_optimizer.param_groups, {"lookahead_alpha": alpha, "lookahead_k": k})
        self.base_optimizer, self.param_groups = base_optimizer, base_optimizer.param_groups
        self.defaults = base_optimizer.defaults
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group.update(lookahead_alpha=alpha, lookahead_k=k, lookahead_step=0)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        self.base_optimizer.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["lookahead_k"] == 0:
                for fast_p in group["params"]:
                    param_state = self.state[fast_p]
                    if "lookahead_slow_buff" not in param_state:
                        param_state["lookahead_slow_buff"] = fast_p.clone()
                    slow = param_state["lookahead_slow_buff"]
                    slow.add_(fast_p - slow, alpha=group["lookahead_alpha"])
                    fast_p.copy_(slow)


@loop(KIND, "huggingface/pytorch-image-models lookahead.py", **APART)
def lookahead(script: Script) -> None:
    """Every third step goes back half of the way to weights that no commit reached."""
    model = nn.Linear(8, 1)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.05), k=3)
    with script.join(model, optimizer) as peer:
        while not peer.done:
            pulled_apart(script, model).backward()
            optimizer.step()
            optimizer.zero_grad()


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
    with script.join(model, optimizer) as peer:
        while not peer.done:
            pulled_apart(script, model).backward()
            optimizer.step()
            optimizer.zero_grad()


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
    with script.join(model, optimizer) as peer:
        while not peer.done:
            model.zero_grad()
            pulled_apart(script, model, torch.bfloat16).backward()
            optimizer.step()


@loop(KIND, "torch.optim.ASGD, whose average is beside the model", **APART)
def asgd(script: Script) -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.ASGD(model.parameters(), lr=0.05, t0=0, lambd=0.0)
    with script.join(model, optimizer) as peer:
        while not peer.done:
            pulled_apart(script, model).backward()
            optimizer.step()
            optimizer.zero_grad()


@loop(KIND, "torch.optim.swa_utils, as its documentation writes it", learns=True)
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


@loop(KIND, "bitsandbytes AdamW8bit, written out", learns=True)
def adamw_of_eight_bits(script: Script) -> None:
    model = mlp(8, 16, 1)
    regression(script, model, AdamW8bit(model.parameters(), lr=2e-2))
