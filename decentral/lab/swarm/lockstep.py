"""Inner steps of all replicas at once, where all step at the same moment and their weights are one tensor each.

A step of 64 small models is mostly the Python of 64 optimizers. Inner optimizers are elementwise, Muon goes matrix by
matrix: one optimizer of the stacked weights makes the very step that each replica's own one would. What it keeps is
stacked, too, and each own optimizer has its row of it, so that methods read and write moments as ever. Once some
replicas step without the others, each goes on with its own optimizer and all that belongs to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from decentral.lab.swarm.lab_peer import LabPeer
from decentral.lab.swarm.stacked_muon import StackedMuon
from decentral.lab.work.base import Trained
from decentral.manifest.terms import INNER_OPTIMIZERS
from decentral.tasks.sizing import warm_up
from decentral.training.inner import built

__all__ = ["Lockstep", "lockstep_of"]

# Shape suffix: R = replicas, first in every stacked tensor.


def lockstep_of(peers: Sequence[LabPeer], trained: Trained) -> Lockstep | None:
    """None where each must step by itself: weights are not stacked, or steps go by losses alone."""
    forward_only = INNER_OPTIMIZERS[peers[0].manifest.inner.named].forward_only
    return None if forward_only or not trained.stacked else Lockstep(peers, trained)


class Lockstep:
    """See the module. Until ``dissolve`` the peers' own optimizers and schedules make no step."""

    def __init__(self, peers: Sequence[LabPeer], trained: Trained) -> None:
        self._peers, self._trained, self._inner = peers, trained, peers[0].manifest.inner
        self._leaves = list(trained.stacked.values())
        self._optimizers = self._built(peers[0])
        self._schedulers = [warm_up(optimizer, self._inner.warmup) for optimizer in self._optimizers]
        self._reads_gradients = peers[0].schedule.method.overrides("before_inner_step")
        self._begun = False

    def _built(self, peer: LabPeer) -> list[torch.optim.Optimizer]:
        """As the peer's own are."""
        names = {id(parameter): name for name, parameter in peer.module.named_parameters()}
        made: list[torch.optim.Optimizer] = []
        for own in peer.optimizers:
            held = [self._trained.stacked[names[id(parameter)]] for parameter in _parameters(own)]
            made += [StackedMuon(held, own)] if isinstance(own, torch.optim.Muon) else built(self._inner, [], held)
        return made

    def step(self, seconds: Sequence[float]) -> None:
        """One of every replica; ``seconds``: virtual ones that it takes each of them."""
        self._trained.gradients({peer.rank: peer.steps for peer in self._peers})
        if self._inner.clip is not None:
            clip_each([leaf.grad for leaf in self._leaves if leaf.grad is not None], self._inner.clip)
        if self._reads_gradients:
            self._trained.hand_out([peer.rank for peer in self._peers])
        for peer in self._peers:
            peer.schedule.stepping()
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
