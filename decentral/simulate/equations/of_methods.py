"""Which equation each outer method has: where an anchor must be after its records.

Written apart from decentral.optimizers, so that an error of a method, or of what it is told of its round, shows. They
take what the records of one fragment averaged, in order, and return the sum of the anchor's moves. Pairs: `pulls`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from decentral.simulate.equations.averaged import Averaged, Keys
from decentral.simulate.equations.contributors import cgad, decoupled, edit, fedbuff, heloco
from decentral.simulate.equations.coordinates import fedopt, just_one_byte, partial_updates, signed
from decentral.simulate.equations.momenta import (
    co2,
    delayed,
    delayed_nesterov,
    heavy_ball,
    muloco,
    nesterov,
    pier,
    plain,
    sparta,
)

__all__ = ["EQUATIONS", "SHARE", "WEIGH"]

EQUATIONS: Mapping[str, Callable[[Sequence[Averaged], Keys], Tensor]] = {
    "sparseloco": plain,
    "sparta": sparta,
    "local_sgd": plain,
    "slowmo": heavy_ball,
    "delayed": delayed,
    "co2": co2,
    "fedopt": fedopt,
    "pier": pier,
    "demo_sgd": signed,
    "des_loc": plain,
    "diloco": nesterov,
    "eager": nesterov,
    "mt_dao": plain,
    "muloco": muloco,
    "partial_updates": partial_updates,
    "scaffold": plain,
    "spes": plain,  # of a model without experts, which belongs to all
    "streaming": nesterov,
    "delayed_nesterov": delayed_nesterov,
    "edit": edit,
    "a_edit": edit,
    "fedbuff": fedbuff,
    "cgad": cgad,
    "heloco": heloco,
    "decoupled": decoupled,
    "just_one_byte": just_one_byte,
}
SHARE = {"cgad", "fedbuff", "partial_updates"}  # methods whose divisor is known of a reduce where all weigh the same
# masha has no equation here: which values are the largest is decided by float32's last bits, of which many are equal.
# Methods whose frames do not count alike, or whose step is another where a mean is zero up to rounding: their mean is
# known where owners sent it.
WEIGH = {"edit", "a_edit", "demo_sgd"}
