"""torch's global switches. The harness puts them back."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from tests.zoo.harness import Script, loop, regression, stack

KIND = "torch's global switches"

mlp = partial(stack, nn.Tanh)


@loop(KIND, "lululxvi/deepxde and jayroxis/PINNs: set_default_dtype(float64)", learns=True)
def pinn_in_float64(script: Script) -> None:
    """A network that obeys an equation: gradients of its output by its input, and a coefficient to be found."""
    torch.set_default_dtype(torch.float64)

    class PINN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dnn, self.lambda_1 = mlp(2, 16, 1), nn.Parameter(torch.tensor([0.0]))

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return self.dnn(torch.cat([x, t], 1))

    model = PINN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss() -> Tensor:
        x, t = script.rand(32, 1).requires_grad_(True), script.rand(32, 1).requires_grad_(True)
        u = model(x, t)
        u_t, u_x = torch.autograd.grad(u.sum(), (t, x), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        f = u_t + model.lambda_1 * u * u_x - 0.01 * u_xx
        return (u - torch.sin(3 * x)).square().mean() + f.square().mean()

    script.train(model, optimizer, loss)


for preset in ("sparseloco", "muloco"):  # which compress, and orthogonalise
    row = f"pinn_in_float64_by_{preset}"
    loop(KIND, "the same, by another method", name=row, learns=True, long=True, outer={"preset": preset})(
        pinn_in_float64
    )


@loop(KIND, "set_default_dtype(bfloat16) around all, as llama's reference code has it", learns=True)
def default_dtype_bfloat16(script: Script) -> None:
    torch.set_default_dtype(torch.bfloat16)
    model = mlp(8, 16, 1)
    regression(script, model, torch.optim.SGD(model.parameters(), lr=5e-2))


@loop(KIND, "Lightning-AI's seed_everything and deterministic=True, anomaly detection", learns=True, long=True)
def deterministic(script: Script) -> None:
    torch.use_deterministic_algorithms(True)
    torch.autograd.set_detect_anomaly(True)
    model = nn.ModuleDict({"embed": nn.Embedding(16, 8), "head": nn.Linear(8, 16)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)

    def loss() -> Tensor:
        ids = script.randint(16, 32)
        return nn.functional.cross_entropy(model["head"](model["embed"](ids)), ids)

    script.train(model, optimizer, loss)


@loop(KIND, "torch.set_grad_enabled(False) for all, enabled where it is trained", learns=True)
def gradients_off_by_default(script: Script) -> None:
    torch.set_grad_enabled(False)
    torch.set_default_device("cpu")
    model = mlp(8, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with script.join(model, optimizer) as peer:
        while not peer.done:
            x = script.randn(32, 8)
            with torch.enable_grad():
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            script.losses.append(loss.item())
