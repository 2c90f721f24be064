"""One inner step as all loops make it: by gradients or by losses alone, and what is called in it, in what order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from decentral.manifest.terms import Inner
from decentral.training.inner import build_inner, inner_step

INPUTS = torch.linspace(-1, 1, 18).view(3, 6)
BY_LOSSES = Inner(optimizer="spsa", learning_rate=1e-3, weight_decay=0.0)
BY_GRADIENTS = Inner(optimizer="sgd", learning_rate=0.1, weight_decay=0.0)


def linear() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(6, 4)


@pytest.mark.parametrize(
    ("inner", "order"),
    [
        (BY_GRADIENTS, ["loss", "backward", "begins", "step"]),
        (BY_LOSSES, ["begins", "loss", "loss", "step"]),
    ],
    ids=["by gradients", "by losses"],
)
def test_a_step_begins_once_what_it_goes_by_is_there_and_only_gradients_need_a_backward_pass(
    inner: Inner, order: list[str]
):
    model, seen = linear(), list[str]()
    optimizers = build_inner(inner, model)
    optimizers[0].register_step_post_hook(lambda *_: seen.append("step"))
    before = model.weight.detach().clone()

    def loss() -> Tensor:
        seen.append("loss")
        return model(INPUTS).square().mean()  # type: ignore[no-any-return]

    def backward(value: Tensor) -> None:
        seen.append("backward")
        value.backward()  # type: ignore[no-untyped-call]  # torch's

    told = inner_step(inner, optimizers, loss, backward=backward, begins=lambda: seen.append("begins"))
    assert seen == order
    assert not torch.equal(model.weight, before)
    with torch.no_grad():
        assert abs(float(told) - float(nn.functional.linear(INPUTS, before, model.bias).square().mean())) < 0.1


def test_every_optimizer_of_several_steps():
    model = linear()
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]
    inner_step(BY_GRADIENTS, optimizers, lambda: model(INPUTS).square().mean())
    assert not any(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))
