"""Models of many small tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.harness import Script, loop

KIND = "many small tensors"


@loop(KIND, "an item's bias and factors each a parameter, as tutorials on factorisation machines have it")
def a_tensor_for_each_item(script: Script) -> None:
    factors = nn.ParameterList([nn.Parameter(torch.randn(8) * 0.3) for _ in range(1000)])
    optimizer = torch.optim.SGD(factors.parameters(), lr=2.0)

    def loss() -> Tensor:
        users, items = script.randint(500, 32).tolist(), (script.randint(500, 32) + 500).tolist()
        scores = torch.stack([factors[u] @ factors[i] for u, i in zip(users, items, strict=True)])
        return F.mse_loss(scores, torch.ones(32))

    script.train(factors, optimizer, loss)


@loop(KIND, "ethanjperez/film, a pair of vectors for each task", learns=True, outer={"preset": "local_sgd"}, long=True)
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

    def loss() -> Tensor:
        task, x = int(script.randint(300, 1)), script.randn(32, 8)
        film = model["film"][task]
        return F.mse_loss(model["head"](model["body"](x) * film["gamma"] + film["beta"]), x.sum(1, keepdim=True))

    script.train(model, optimizer, loss)
