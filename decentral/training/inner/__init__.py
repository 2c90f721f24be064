"""Inner optimizers that a manifest can name, one file each where torch has none, and what a round sees of them."""

from decentral.training.inner.averages import Averages
from decentral.training.inner.building import build_inner, built, forward_only
from decentral.training.inner.stepping import inner_step

__all__ = ["Averages", "build_inner", "built", "forward_only", "inner_step"]
