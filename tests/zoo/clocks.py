"""Clocks of the loop: schedules and lengths that count the loop's own steps."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.harness import Script, loop, mlp, regression

KIND = "clocks of the loop"


@loop(KIND, "harvardnlp/annotated-transformer run_epoch", learns=True, long=True)
def noam(script: Script) -> None:
    """A LambdaLR by steps; the optimizer steps at every other batch, the schedule at each."""

    def rate(step: int) -> float:
        step = max(step, 1)
        return 8 ** (-0.5) * min(step ** (-0.5), step * 8 ** (-1.5))

    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(16, 8),
            "encoder": nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            "generator": nn.Linear(8, 16),
        }
    )
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5, betas=(0.9, 0.98), eps=1e-9)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer=optimizer, lr_lambda=rate)
    with script.join(model, optimizer, scheduler=lr_scheduler) as peer:
        i = 0
        while not peer.done:
            i += 1
            src = script.randint(16, 16, 4)
            out = model["generator"](model["encoder"](model["embed"](src)))
            loss = F.cross_entropy(out.reshape(-1, 16), src.reshape(-1), label_smoothing=0.1)
            loss.backward()
            if i % 2 == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                lr_scheduler.step()
            script.losses.append(loss.item())


class NoamOpt:
    """As the first annotated transformer and OpenNMT-py have it: it steps an optimizer at a rate of its own."""

    def __init__(self, warmup: int, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self._step, self.warmup = optimizer, 0, warmup
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        self._step += 1
        for p in self.optimizer.param_groups:
            p["lr"] = 0.1 * min(self._step ** (-0.5), self._step * self.warmup ** (-1.5))
        self.optimizer.step()


@loop(KIND, "harvardnlp/annotated-transformer of 2018, NoamOpt", learns=True)
def noam_opt(script: Script) -> None:
    model = mlp(8, 16, 1)
    model_opt = NoamOpt(4, torch.optim.Adam(model.parameters(), lr=0, betas=(0.9, 0.98), eps=1e-9))
    regression(script, model, model_opt)


@loop(KIND, "fastai and pytorch/vision with OneCycleLR", learns=True)
def one_cycle(script: Script) -> None:
    """As long as the run and no step longer: rate and momentum go by every batch."""
    model = mlp(8, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, epochs=3, steps_per_epoch=4)
    with script.join(model, optimizer, scheduler=scheduler) as peer:
        for _ in range(3):
            if peer.done:
                break
            for _ in range(4):
                x = script.randn(32, 8)
                loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
                loss.backward()
                nn.utils.clip_grad_value_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                script.losses.append(loss.item())


@loop(KIND, "loshchilov/SGDR in timm's way: step(epoch + i / iters)", learns=True, long=True)
def warm_restarts(script: Script) -> None:
    """Fractions of an epoch; the average outside has a decay that warms up with its own count."""
    model = mlp(8, 16, 1)
    ema = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2)
    with script.join(model, optimizer, scheduler=scheduler) as peer:
        num_updates = 0
        for epoch in range(100):
            if peer.done:
                break
            for i in range(3):
                x = script.randn(32, 8)
                loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                num_updates += 1
                scheduler.step(epoch + i / 3)
                decay = min(0.999, (1 + num_updates) / (10 + num_updates))
                for name, value in model.state_dict().items():
                    ema[name].lerp_(value, 1 - decay)
                script.losses.append(loss.item())
                if peer.done:
                    break


class GradualWarmup(torch.optim.lr_scheduler.LRScheduler):
    """As ildoonet's: the schedule that comes after it is among its values, and so in its ``state_dict``."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total: int, after: torch.optim.lr_scheduler.LRScheduler
    ) -> None:
        self.total_epoch, self.after_scheduler = total, after
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch > self.total_epoch:
            return [float(rate) for rate in self.after_scheduler.get_last_lr()]
        return [rate * self.last_epoch / self.total_epoch for rate in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch >= self.total_epoch:
            self.after_scheduler.step()
        super().step(epoch)


@loop(KIND, "ildoonet/pytorch-gradual-warmup-lr", learns=True)
def gradual_warmup(script: Script) -> None:
    model = mlp(8, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = GradualWarmup(optimizer, 3, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100))
    regression(script, model, optimizer, scheduler=scheduler, ends=lambda step: scheduler.step())


@loop(KIND, "maziarraissi/PINNs in PyTorch: Adam first, then LBFGS", warned="LBFGS")
def adam_then_lbfgs(script: Script) -> None:
    """Two phases: an inner step is one of each, and there is none while the other only waits."""
    model = mlp(1, 16, 1)
    adam, newton = torch.optim.Adam(model.parameters(), lr=1e-3), torch.optim.LBFGS(model.parameters(), max_iter=2)
    with script.join(model, [adam, newton]) as peer:
        x = script.randn(16, 1)

        def closure() -> torch.Tensor:
            newton.zero_grad()
            loss = F.mse_loss(model(x), torch.sin(x))
            loss.backward()
            return loss

        for _ in range(150):
            if peer.done:
                break
            adam.zero_grad()
            F.mse_loss(model(x), torch.sin(x)).backward()
            adam.step()
        for _ in range(20):
            if peer.done:
                break
            newton.step(closure)
