"""Steps that several methods take, as pure functions of tensors.

Every operation is elementwise IEEE arithmetic without fused multiply-add: ``a + b * c`` is written as a product and a
sum, because ``add(alpha=...)`` may or may not fuse, and then peers would differ in the last bit.
"""

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.tensors.ops import with_momentum

__all__ = ["check_momentum", "check_rate", "check_waiting", "heavy_ball", "nesterov", "root"]


def nesterov(
    anchor: Tensor, gradient: Tensor, momentum_buffer: Tensor, lr: float, momentum: float
) -> tuple[Tensor, Tensor]:
    """``m <- mu*m + g ; x <- x - lr*(g + mu*m)``: torch's ``SGD(nesterov=True)``, with m = 0 before the first step."""
    with torch.no_grad():
        return with_momentum(anchor, gradient, momentum_buffer, (lr, momentum), nesterov=True)


def heavy_ball(
    anchor: Tensor, gradient: Tensor, momentum_buffer: Tensor, lr: float, momentum: float
) -> tuple[Tensor, Tensor]:
    """``m <- mu*m + g ; x <- x - lr*m``: torch's ``SGD(nesterov=False)``, with m = 0 before the first step."""
    with torch.no_grad():
        return with_momentum(anchor, gradient, momentum_buffer, (lr, momentum), nesterov=False)


def root(square: Tensor) -> Tensor:
    """The square root, by way of float64: an error in the last bit of that is too small to round float32 otherwise,
    where a vector library's float32 root may differ from another machine's.
    """
    return square.double().sqrt().to(square.dtype)


def check_rate(method: object, lr: float) -> None:
    """ConfigError unless the outer learning rate is positive and finite."""
    if not 0 < lr < float("inf"):
        raise ConfigError(f"{method}: lr must be above 0 and finite; 0.4 to 1.0 is usual")


def check_momentum(method: object, momentum: float) -> None:
    """ConfigError unless the momentum is in [0, 1)."""
    if not 0 <= momentum < 1:
        raise ConfigError(f"{method}: momentum must be in [0, 1); 0.9 is usual, 0 is none")


def check_waiting(method: object, wait_for: int, grace: float, staleness: int) -> None:
    """ConfigError unless a round can wait so, and a contribution be so late."""
    if wait_for < 1 or staleness < 0:
        raise ConfigError(f"{method}: wait_for must be at least 1 contribution, staleness at least 0 outer steps")
    if not 0 <= grace <= 3600:
        raise ConfigError(f"{method}: grace must be in [0, 3600] s; 1 is usual")
