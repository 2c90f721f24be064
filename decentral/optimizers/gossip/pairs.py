"""What gossip methods share: the pull of a peer towards its pair's mean, and how strong it may be beside momentum.

x <- x - a*(s - mean(s))      s: the parameters as both of a pair were sent them, the own ones too

It uses only what was sent, so that the pulls of a pair cancel and the mean of all replicas is kept, whatever
compression did. Without training a replica with momentum mu moves by x_new = x + mu*(x - x_old) - a*(x - mean). Over
random pairs the expected square of the disagreement contracts when 0 < a < 2*(1 - mu**2): exact for an odd number of
replicas, one of which is left over at each step, and in the limit of many. An even number of them bears more (for mu
0.5, where the bound is 1.5, two replicas contract up to 3, four up to 1.8, eight up to 1.61, 64 up to 1.51), but peers
come and go.
"""

import torch
from torch import Tensor

from decentral.errors import ConfigError

__all__ = ["check_pull", "pull_to_mean"]

# Shape suffixes: N = elements of one fragment, flat float32; K = the peers of the pair that came, oneself first.


def pull_to_mean(sent_KN: Tensor, strength: float) -> Tensor:
    """What to subtract; 0 for a peer that is alone."""
    with torch.no_grad():
        return (sent_KN[0] - sent_KN.sum(0) / len(sent_KN)) * strength


def check_pull(method: object, pull: str, momentum: str) -> None:
    """ConfigError unless replicas stay together, with the method's own names of the two keys."""
    bound = 2 * (1 - getattr(method, momentum) ** 2)
    if not 0 <= getattr(method, pull) < bound:
        raise ConfigError(
            f"{method}: replicas drift apart unless {pull} < 2*(1 - {momentum}**2) = {bound:.3g}; "
            f"lower {pull} or {momentum} (0 switches the pull off)"
        )
