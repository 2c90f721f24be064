"""A rule on mixtures of contributions, said as what each contribution counts."""
# Shape suffixes: K = contributions, J = mixtures of them.

from decentral.optimizers.aggregation.rule import Aggregation
from decentral.optimizers.aggregation.sent import Floats, Sent

__all__ = ["scales_through"]


def scales_through(sent: Sent, share_JK: Floats, weight_J: Floats, rule: Aggregation) -> list[float]:
    """What each contribution is multiplied by where ``rule`` decides over mixtures of them."""
    mixed = sent.mixed(share_JK, weight_J)
    of_mixture_J = mixed.shares_of(rule.weigh(mixed))
    share_K = of_mixture_J[0] * share_JK[0]
    for j in range(1, len(share_JK)):
        share_K = share_K + of_mixture_J[j] * share_JK[j]
    return sent.scales_of(share_K)
