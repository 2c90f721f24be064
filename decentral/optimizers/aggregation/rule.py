"""What an aggregation rule is: how the contributions to a round become one vector.

A rule says what each contribution is multiplied by: the result is sum(w_i s_i x_i) / sum(w_i), w the run's weights. It
sees inner products and no vector, so sparse contributions stay sparse. Rules by coordinates see rows instead.

A rule is one frozen dataclass in one file of ``rules``, or an entry point "decentral.aggregation" of another package;
its fields are the keys that ``[outer.aggregation]`` accepts beside ``rule``. A rule sees one fragment at a time, and of
a contribution its first channel: states beside the change are averaged. What a rule leaves out is not owed again.

With fewer contributors than it needs no rule can tell who is wrong: they are then shortened to the typical norm, and of
two the mean is taken (`norm_clip`). All peers see the same contributors, so all do the same.
"""
# Shape suffixes: N = elements of one fragment, flat float32; K = contributors, by peer id.

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.aggregation.norm_clip import clip_scales
from decentral.optimizers.aggregation.sent import Sent

__all__ = ["Aggregation", "Needs", "check_f", "check_iterations", "chosen_scales", "typical_scales"]

Needs = Literal["nothing", "norms", "products", "rows"]  # nothing: the plain mean
MOST_PEERS = 1024  # of a run
MOST_ITERATIONS = 1000


class Aggregation:
    """Defaults of a rule that looks at inner products."""

    __slots__ = ()

    name: ClassVar[str]  # in manifests
    equation: ClassVar[str] = "not described"
    source: ClassVar[str] = "not described"  # authors, title, year, arXiv

    @property
    def needs(self) -> Needs:
        """What it must know of the contributions."""
        return "products"

    @property
    def least(self) -> int:
        """Contributors below which it cannot tell who is wrong."""
        return 3

    def scales(self, sent: Sent) -> list[float]:
        """What each is multiplied by; at least ``least`` of them, each with a weight above 0."""
        raise NotImplementedError

    def combine(self, row_KN: Tensor) -> Tensor:
        """The result (N,) of a rule by coordinates, which counts heads; at least ``least`` rows."""
        raise NotImplementedError

    def weigh(self, sent: Sent) -> list[float]:
        """The scales of all; who has no weight is not looked at."""
        counted = [place for place, weight in enumerate(sent.weight_K) if weight > 0]
        among, found = sent.among(counted), [1.0] * len(sent)
        enough = len(counted) >= self.least
        for place, scale in zip(counted, self.scales(among) if enough else typical_scales(among), strict=True):
            found[place] = scale
        return found


def typical_scales(sent: Sent) -> list[float]:
    """Where there are too few for a rule: see above."""
    return clip_scales(sent.norm_K.tolist())


def check_f(rule: object, f: int) -> None:
    """ConfigError unless f is a number of contributors that may be wrong."""
    if not 1 <= f < MOST_PEERS // 2:
        raise ConfigError(
            f"{rule}: f contributors may send anything, want 1 <= f < {MOST_PEERS // 2}; 0 is the rule mean"
        )


def check_iterations(rule: object, iterations: int) -> None:
    """ConfigError unless every peer can make so many."""
    if not 1 <= iterations <= MOST_ITERATIONS:
        raise ConfigError(f"{rule}: want 1 <= iterations <= {MOST_ITERATIONS}; 8 is usual")


def chosen_scales(sent: Sent, chosen: Sequence[int]) -> list[float]:
    """The weighted mean of those at these places."""
    return sent.scales_of(sent.mean_shares(chosen))
