"""The inner optimizers of a manifest, built for a model.

Muon is torch's, for the matrices inside, with AdamW beside it for embeddings, head and vectors. Its rate is scaled by
0.2 * sqrt(max(rows, columns)), so that its steps are as long as AdamW's and one ``learning_rate`` fits both; decay uses
the rate as it is. No Nesterov, as in MuLoCo, which scales by sqrt(rows / columns) instead.

Source of Muon: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; of the scale: Liu et
al., "Muon is Scalable for LLM Training", 2025, arXiv:2502.16982.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from decentral.manifest.inner_optimizers import INNER_OPTIMIZERS, InnerName
from decentral.manifest.training_terms import Inner
from decentral.training.inner.adopt import ADOPT
from decentral.training.inner.gpa import GPA
from decentral.training.inner.qh_adopt import QHADOPT
from decentral.training.inner.schedule_free import ScheduleFree
from decentral.training.inner.spsa import SPSA

__all__ = ["build_inner", "built", "forward_only"]

Optimizers = list[torch.optim.Optimizer]
Own = Mapping[str, float]


def build_inner(inner: Inner, model: nn.Module) -> Optimizers:
    """One optimizer, or two of which each has some of the parameters; a step of every one is an inner step."""
    held = list(model.parameters())
    if INNER_OPTIMIZERS[inner.named].forward_only:
        return [forward_only(inner, [(name, p) for name, p in model.named_parameters() if p.requires_grad])]
    hidden = {id(parameter) for parameter in _hidden_matrices(model)} if inner.named == "muon" else set()
    return built(inner, [p for p in held if id(p) in hidden], [p for p in held if id(p) not in hidden])


def built(inner: Inner, matrices: Sequence[Tensor], others: Sequence[Tensor]) -> Optimizers:
    """For parameters of which Muon may have the ``matrices``; any other optimizer has all."""
    own = inner.own()
    if inner.named != "muon":
        return [_MAKERS[inner.named](inner, own, [*matrices, *others])]
    parts = (_muon, matrices), (_adamw, others)
    return [make(inner, own, held) for make, held in parts if held]


def forward_only(inner: Inner, named: Sequence[tuple[str, Tensor]], seed: int | None = None) -> torch.optim.Optimizer:
    """The one that steps by losses alone, for parameters with their names in the model; ``seed``: see SPSA."""
    return SPSA(named, lr=inner.learning_rate, seed=seed)


def _hidden_matrices(model: nn.Module) -> list[Tensor]:
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = getattr(model, "get_output_embeddings", lambda: None)()  # transformers' models; others may tie or not
    apart = {id(p) for module in [*embeddings, *([head] if head is not None else [])] for p in module.parameters()}
    return [parameter for parameter in model.parameters() if parameter.ndim == 2 and id(parameter) not in apart]


def _betas(own: Own) -> tuple[float, float]:
    return own["beta1"], own["beta2"]


def _adamw(inner: Inner, own: Own, held: Sequence[Tensor]) -> torch.optim.Optimizer:
    rate, decay, one_pass = inner.learning_rate, inner.weight_decay, _in_one_pass(held)
    return torch.optim.AdamW(held, lr=rate, betas=_betas(own), weight_decay=decay, fused=one_pass)


def _in_one_pass(held: Sequence[Tensor]) -> bool | None:
    """Whether torch has a kernel for whole steps of these. 29 small tensors on a processor take 0.15 ms, else 0.96."""
    here = all(p.device.type in {"cpu", "cuda"} and p.is_floating_point() for p in held)
    return here or None  # None: as torch chooses


def _muon(inner: Inner, own: Own, held: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon(
        held,
        lr=inner.learning_rate,
        weight_decay=inner.weight_decay,
        momentum=own["momentum"],
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
    )


def _sgd(inner: Inner, own: Own, held: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(held, lr=inner.learning_rate, momentum=own["momentum"], weight_decay=inner.weight_decay)


def _adopt(inner: Inner, own: Own, held: Sequence[Tensor]) -> torch.optim.Optimizer:
    return ADOPT(held, lr=inner.learning_rate, betas=_betas(own), weight_decay=inner.weight_decay)


def _qh_adopt(inner: Inner, own: Own, held: Sequence[Tensor]) -> torch.optim.Optimizer:
    return QHADOPT(
        held, lr=inner.learning_rate, betas=_betas(own), mixing=own["mixing"], weight_decay=inner.weight_decay
    )


def _schedule_free(inner: Inner, own: Own, held: Sequence[Tensor]) -> torch.optim.Optimizer:
    return ScheduleFree(
        held, lr=inner.learning_rate, beta2=own["beta2"], mixing=own["mixing"], weight_decay=inner.weight_decay
    )


def _gpa(inner: Inner, own: Own, held: Sequence[Tensor]) -> torch.optim.Optimizer:
    return GPA(
        held,
        lr=inner.learning_rate,
        betas=_betas(own),
        mixing=own["mixing"],
        averaging=own["averaging"],
        weight_decay=inner.weight_decay,
    )


_MAKERS: Final[Mapping[InnerName, Callable[[Inner, Own, Sequence[Tensor]], torch.optim.Optimizer]]] = {
    "adamw": _adamw,
    "adopt": _adopt,
    "sgd": _sgd,
    "schedule_free": _schedule_free,
    "gpa": _gpa,
    "qh_adopt": _qh_adopt,
}
