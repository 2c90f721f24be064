"""Inner steps of all replicas at once, where all step at the same moment and their weights are one tensor each.

A step of 64 small models is mostly the Python of 64 optimizers. Inner optimizers are elementwise, Muon goes matrix by
matrix: one optimizer of the stacked weights makes the very step that each replica's own one would. What it keeps is
stacked, too, and each own optimizer has its row of it, so that methods read and write moments as ever. Once some
replicas step without the others, each goes on with its own optimizer and all that belongs to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from decentral.lab.work import Trained
from decentral.manifest.terms import INNER_OPTIMIZERS
from decentral.training.inner import built, warm_up
from decentral.trial.replicas import TrialPeer

__all__ = ["Lockstep", "StackedMuon", "lockstep_of"]


# Shape suffixes: R = replicas, first in every stacked tensor; A = rows, C = columns of a matrix, A <= C inside Muon's
# iteration.


def lockstep_of(peers: Sequence[TrialPeer], trained: Trained) -> Lockstep | None:
    """None where each must step by itself: weights are not stacked, or steps go by losses alone."""
    forward_only = INNER_OPTIMIZERS[peers[0].manifest.inner.optimizer_name].forward_only
    return None if forward_only or not trained.stacked else Lockstep(peers, trained)


class Lockstep:
    """All replicas' inner steps. Until ``dissolve`` the peers' own optimizers and schedules make no step."""

    def __init__(self, peers: Sequence[TrialPeer], trained: Trained) -> None:
        self._peers, self._trained, self._inner = peers, trained, peers[0].manifest.inner
        self._leaves = list(trained.stacked.values())
        self._optimizers = self._built(peers[0])
        self._schedulers = [warm_up(optimizer, self._inner.warmup) for optimizer in self._optimizers]
        self._reads_gradients = peers[0].schedule.method.acts_before_steps
        self._begun = False

    def _built(self, peer: TrialPeer) -> list[torch.optim.Optimizer]:
        """As the peer's own are."""
        names = {id(parameter): name for name, parameter in peer.module.named_parameters()}
        made: list[torch.optim.Optimizer] = []
        for own in peer.optimizers:
            held = [self._trained.stacked[names[id(parameter)]] for parameter in _parameters(own)]
            made += [StackedMuon(held, own)] if isinstance(own, torch.optim.Muon) else built(self._inner, [], held)
        return made

    def step(self, seconds: Sequence[float]) -> None:
        """Make one inner step of every replica; ``seconds``: virtual ones that it takes each of them."""
        self._trained.gradients({peer.rank: peer.steps for peer in self._peers})
        if self._inner.clip is not None:
            clip_each([leaf.grad for leaf in self._leaves if leaf.grad is not None], self._inner.clip)
        if self._reads_gradients:
            self._trained.hand_out([peer.rank for peer in self._peers])
        for peer in self._peers:
            peer.stepping()
        for optimizer in self._optimizers:
            optimizer.step()
        if not self._begun:
            self._share()
        for scheduler in self._schedulers:
            scheduler.step()
        for leaf in self._leaves:
            leaf.grad = None
        for peer, each in zip(self._peers, seconds, strict=True):
            peer.stepped(each)

    def _share(self) -> None:
        """The first step has made what optimizers keep: each peer's own have their rows of it."""
        self._begun = True
        for rank, peer in enumerate(self._peers):
            for own, stacked in zip(peer.optimizers, self._optimizers, strict=True):
                for parameter, leaf in zip(_parameters(own), _parameters(stacked), strict=True):
                    own.state[parameter] = {name: _row(kept, leaf, rank) for name, kept in stacked.state[leaf].items()}

    def dissolve(self) -> None:
        """From now on each peer steps by itself."""
        if not self._begun:
            return
        self._share()  # what is no row, as a count of steps, is as old as the first step
        for peer in self._peers:
            for own, stacked in zip(peer.optimizers, self._optimizers, strict=True):
                for state in own.state.values():
                    state.update({name: one.clone() for name, one in state.items() if _is_number(one)})
                for group, told in zip(own.param_groups, stacked.param_groups, strict=True):
                    group.update({name: told[name] for name in group.keys() & told.keys() - {"params"}})
            peer.schedule_as(self._schedulers)


def clip_each(gradients: Sequence[Tensor], most: float) -> None:
    """``torch.nn.utils.clip_grad_norm_`` of each replica by itself, its gradients (R, ...) in place."""
    norms_R = torch.stack([one.flatten(1).norm(dim=1) for one in gradients]).norm(dim=0)
    share_R = (most / (norms_R + 1e-6)).clamp(max=1.0)
    for one in gradients:
        one.mul_(share_R.view(-1, *[1] * (one.ndim - 1)))


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _row(kept: Any, leaf: Tensor, rank: int) -> Any:  # Any: tensors and numbers
    return kept[rank] if isinstance(kept, Tensor) and kept.shape == leaf.shape else kept


def _is_number(kept: Any) -> bool:  # Any: as above
    return isinstance(kept, Tensor) and kept.ndim == 0


# ---- Muon of many replicas ----
#
# Every matrix is one tensor (R, rows, columns), orthogonalised as a batch.
#
# B <- b*B + (1-b)*g ;  O = NS(B) ;  x <- x*(1 - lr*wd) - lr*0.2*sqrt(max(rows, columns))*O
#
# What ``torch.optim.Muon`` does to each by itself, as `decentral.training.inner` builds it: five Newton-Schulz steps in
# bfloat16, no Nesterov. A test compares them. One after the other the small matrices of 64 replicas take most of a
# step.
#
# Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; of the scale: Liu et al.,
# "Muon is Scalable for LLM Training", 2025, arXiv:2502.16982.

Group = dict[str, Any]  # Any: numbers and words, as torch's Muon has them
_OF_TORCH = ("lr", "weight_decay", "momentum", "ns_coefficients", "ns_steps", "eps")


class StackedMuon(torch.optim.Optimizer):
    """State of a stacked matrix: momentum_buffer, as torch's."""

    def __init__(self, stacked: Sequence[Tensor], like: torch.optim.Muon) -> None:
        """``like``: the optimizer of one replica, whose numbers count."""
        super().__init__(stacked, {name: like.defaults[name] for name in _OF_TORCH})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # overloads
        """Make one step of every matrix of every replica."""
        assert closure is None, "gradients are made beforehand"
        for group in self.param_groups:
            for stacked in group["params"]:
                assert stacked.grad is not None, "every matrix has a part in the loss"
                self._update(stacked, stacked.grad, group)
        return None

    def _update(self, stacked_RAC: Tensor, gradient_RAC: Tensor, group: Group) -> None:
        state = self.state[stacked_RAC]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient_RAC)
        state["momentum_buffer"].lerp_(gradient_RAC, 1 - group["momentum"])
        made_RAC = _orthogonal(state["momentum_buffer"], group)
        scale = 0.2 * math.sqrt(max(stacked_RAC.shape[1:]))
        stacked_RAC.mul_(1 - group["lr"] * group["weight_decay"]).add_(made_RAC, alpha=-group["lr"] * scale)


def _orthogonal(matrix_RAC: Tensor, group: Group) -> Tensor:
    """Newton-Schulz: singular values go to about 1."""
    a, b, c = group["ns_coefficients"]
    tall = matrix_RAC.shape[1] > matrix_RAC.shape[2]
    made_RAC = matrix_RAC.bfloat16().mT if tall else matrix_RAC.bfloat16()
    made_RAC = made_RAC / made_RAC.flatten(1).norm(dim=1).clamp(min=group["eps"]).view(-1, 1, 1)
    for _ in range(group["ns_steps"]):
        gram_RAA = made_RAC @ made_RAC.mT
        made_RAC = torch.baddbmm(
            made_RAC, torch.baddbmm(gram_RAA, gram_RAA, gram_RAA, beta=b, alpha=c), made_RAC, beta=a
        )
    return made_RAC.mT if tall else made_RAC
