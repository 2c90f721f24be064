"""What an attack is: what hostile peers of a round do instead of sending the change that they trained.

The attacker knows everything: what honest peers will send, as receivers decode it, and the rule in use. Most attacks
craft a vector of it; what is sent then goes through the run's compressor, as everybody's does. Others train as honest
peers do, on labels that are wrong, or keep back what they offered.

A change is a descent direction, anchor - local: the outer step subtracts it.

An attack is one frozen dataclass in one file here, or an entry point "decentral.attacks" of another package; its fields
are the keys of its spelling: ``scale(factor=100)``.
"""
# Shape suffixes: N = elements of one fragment, flat; K = honest contributors, F = hostile ones, B = labels of a batch.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["Attack", "Rule", "alike", "distance_from_honest"]

Rule = Callable[[Tensor], Tensor]  # rows (K + F, N), the honest ones first -> what receivers make of them (N,)


class Attack:
    """Defaults of an attack that crafts vectors, trains on the right labels and delivers what it offers."""

    __slots__ = ()

    name: ClassVar[str]  # in spellings
    equation: ClassVar[str]
    source: ClassVar[str]  # authors, title, year, arXiv
    poisons_data: ClassVar[bool] = False  # hostile peers train, on ``labels``, and send what they trained
    withholds: ClassVar[bool] = False  # hostile peers train and offer; ``delivers`` says who of them sends

    @property
    def crafts(self) -> bool:
        """Whether hostile peers send ``changes``; others send what they trained."""
        return not (self.poisons_data or self.withholds)

    def changes(self, honest_KN: Tensor, num_hostile: int, rule: Rule, generator: torch.Generator) -> Tensor:
        """What hostile peers send (F, N), where they craft it. ``honest_KN``: what receivers decode of honest peers."""
        raise NotImplementedError

    def labels(self, label_B: Tensor, num_labels: int) -> Tensor:
        """What hostile peers take for the labels, each from 0 to ``num_labels`` - 1."""
        return label_B

    def delivers(self, num_hostile: int, generator: torch.Generator) -> list[bool]:
        """Which of the hostile peers' contributions are part of this round."""
        return [True] * num_hostile


def alike(row_N: Tensor, num_hostile: int) -> Tensor:
    """The same vector from every hostile peer (F, N)."""
    return row_N.expand(num_hostile, -1).clone()


def distance_from_honest(honest_KN: Tensor, hostile_FN: Tensor, rule: Rule) -> float:
    """How far what receivers make of all is from the mean of the honest ones: what the optimised attacks maximise.

    Of vectors that are not finite, which no peer takes, it is less than of any other.
    """
    if not bool(hostile_FN.isfinite().all()):
        return -math.inf
    apart_N = rule(torch.cat([honest_KN, hostile_FN])).double() - honest_KN.double().mean(0)
    return float(torch.linalg.vector_norm(apart_N))
