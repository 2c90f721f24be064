"""Parameters that are replaced, resized, thawed or added after the join."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.harness import Script, loop, mlp, regression

KIND = "parameters replaced or resized"


@loop(KIND, "fastai gradual unfreezing", refused="was not trained")
def gradual_unfreezing(script: Script) -> None:
    """Only the head is trained at first; freeze_to(-2) thaws the body after an epoch."""
    learn = mlp(8, 16, 1)
    learn[0].requires_grad_(False)
    opt = torch.optim.AdamW(learn.parameters(), lr=1e-3)
    regression(script, learn, opt, begins=lambda step: learn[0].requires_grad_(step >= 5))


@loop(KIND, "huggingface/peft freeze of a layer in the midst of training")
def frozen_after_warmup(script: Script) -> None:
    """Embeddings are frozen for good after the warm-up."""
    model = nn.ModuleDict({"embed": nn.Embedding(16, 8), "head": nn.Linear(8, 16)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        ids = script.randint(16, 16)
        return F.cross_entropy(model["head"](model["embed"](ids)), ids)

    script.train(model, optimizer, loss, begins=lambda step: model["embed"].requires_grad_(step < 5))


@loop(KIND, "akanimax/pro_gan_pytorch", refused="blocks.1")
def progressive_growing(script: Script) -> None:
    """A block is added for the next resolution, and the optimizer told of it by add_param_group."""
    gen = nn.ModuleDict({"initial": nn.Linear(4, 8), "blocks": nn.ModuleList([nn.Linear(8, 8)])})
    optimizer = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.0, 0.99))

    def grow(step: int) -> None:
        if step == 5:
            gen["blocks"].append(nn.Linear(8, 8))
            optimizer.add_param_group({"params": gen["blocks"][-1].parameters()})

    def loss() -> Tensor:
        x = gen["initial"](script.randn(16, 4))
        for block in gen["blocks"]:
            x = block(F.leaky_relu(x, 0.2))
        return (x - 1).square().mean()

    script.train(gen, optimizer, loss, begins=grow)


@loop(KIND, "other storage for the same parameter: p.data = ..., as RAdam of LiyuanLucasLiu writes", learns=True)
def other_storage(script: Script) -> None:
    model = mlp(8, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def put_elsewhere(step: int) -> None:
        for p in model.parameters():
            p.data = p.data.clone().clamp(-2, 2)

    regression(script, model, optimizer, ends=put_elsewhere)
