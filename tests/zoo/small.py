"""Models of many small tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.harness import Script, loop

KIND = "many small tensors"


@loop(KIND, "LoRA on every expert of a mixture, as peft does for Mixtral", learns=True)
def lora_on_experts(script: Script) -> None:
    """2 blocks of 128 experts with four tensors of 8 or 16 values each: 1,024 tensors."""

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1 = nn.Parameter(torch.randn(8, 8) / 3, requires_grad=False)
            self.w2 = nn.Parameter(torch.randn(8, 8) / 3, requires_grad=False)
            self.a1, self.a2 = (nn.Parameter(torch.randn(8, 1) * 0.3) for _ in range(2))
            self.b1, self.b2 = (nn.Parameter(torch.zeros(1, 8)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.relu(x @ self.w1 + x @ self.a1 @ self.b1)
            return hidden @ self.w2 + hidden @ self.a2 @ self.b2

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(8, 128).requires_grad_(False)
            self.experts = nn.ModuleList([Expert() for _ in range(128)])

        def forward(self, x: Tensor) -> Tensor:
            chosen = self.router(x).argmax(1)
            found = torch.zeros_like(x)
            for e in chosen.unique().tolist():
                mine = chosen == e
                found[mine] = self.experts[e](x[mine])
            return x + found

    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    with script.join(model, optimizer) as peer:
        while not peer.done:
            x = script.randn(64, 8)
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            script.losses.append(loss.item())


@loop(KIND, "an item's bias and factors each a parameter, as tutorials on factorisation machines have it")
def a_tensor_for_each_item(script: Script) -> None:
    factors = nn.ParameterList([nn.Parameter(torch.randn(8) * 0.3) for _ in range(1000)])
    optimizer = torch.optim.SGD(factors.parameters(), lr=2.0)
    with script.join(factors, optimizer) as peer:
        while not peer.done:
            users, items = script.randint(500, 32).tolist(), (script.randint(500, 32) + 500).tolist()
            scores = torch.stack([factors[u] @ factors[i] for u, i in zip(users, items, strict=True)])
            loss = F.mse_loss(scores, torch.ones(32))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            script.losses.append(loss.item())


@loop(KIND, "ethanjperez/film, a pair of vectors for each task", learns=True, outer={"preset": "local_sgd"})
def film_of_many_tasks(script: Script) -> None:
    """Two vectors for each of 300 tasks, of which a batch touches one: most gradients are None."""
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, 1)})
    model["film"] = nn.ModuleList(
        [
            nn.ParameterDict({"gamma": nn.Parameter(torch.ones(8)), "beta": nn.Parameter(torch.zeros(8))})
            for _ in range(300)
        ]
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    with script.join(model, optimizer) as peer:
        while not peer.done:
            task, x = int(script.randint(300, 1)), script.randn(32, 8)
            film = model["film"][task]
            loss = F.mse_loss(model["head"](model["body"](x) * film["gamma"] + film["beta"]), x.sum(1, keepdim=True))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            script.losses.append(loss.item())
