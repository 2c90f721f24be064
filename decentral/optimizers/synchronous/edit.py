"""EDiT: contributions count by a softmax over their norms, and one that is far off what was usual counts nothing.

G_i = ||g_i|| ;  w = softmax(-G / T) over those that are no outliers (aggregation/usual_norm.py)
g = sum w_i g_i ;  g <- min(1, clip / (||g|| + 1e-6)) g ;  m <- mu*m + g ;  x <- x - lr*(g + mu*m)

When all contributions are outliers nothing moves, every live copy goes back to the anchor, and all peers are told;
after ``relearn_after`` such rounds in a row the detector begins anew, so that a run whose norms have grown goes on.

What differs from the paper. It works layer by layer; here by fragment, and [outer] fragments cuts them. Its detector is
one for each worker; here one over all, in the shared state, so that it survives a worker's leaving and is in every
snapshot. Outliers never enter it, where the authors' FSDP code lets one poison it. In a gather every peer measures the
norms of what came, to the same bits. In a reduce nobody has a whole change: norms are those that senders state, signed,
and the record names them; who states a small one counts more than it should. Equal norms give the plain mean.

Source: Cheng et al., "EDiT: A Local-SGD-Based Efficient Distributed Training Method for Large Language Models", 2024,
arXiv:2412.07210; constants as in intelligent-machine-learning/atorch (outer mu 0.8, a 0.02, threshold 3, clip 10).
"""

from dataclasses import dataclass
from typing import ClassVar

from decentral.optimizers.base import OuterMethod, Preset, key
from decentral.optimizers.synchronous.guarded_mean import (
    check_guard,
    clipped_step,
    nothing_usual,
    own_norm,
    relearnt,
    softmax_of_norms,
)

__all__ = ["EDiT"]


@dataclass(frozen=True, slots=True)
class EDiT(OuterMethod):
    """Nesterov on a guarded mean; state {"momentum": (N,), "usual": (4,), "frozen": (1,)}: what norms are usual, and
    rounds in a row in which all were outliers.
    """

    name: ClassVar[str] = "edit"
    equation: ClassVar[str] = "w = softmax(-||g_i||/T) without outliers ; m <- mu*m + g ; x <- x - lr*(g + mu*m)"
    source: ClassVar[str] = 'Cheng et al., "EDiT", 2024, arXiv:2412.07210'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.7, "momentum": 0.8}, compressor="int8(block=4096)", exchange="reduce"
    )
    measures: ClassVar[bool] = True
    lr: float = 0.7
    momentum: float = key(0.8, "of the outer step; 0 is none")
    temperature: float = key(1.0, "T of the softmax over norms: large counts all alike")
    clip: float = key(10.0, "largest norm of the mean of a fragment's changes")
    warmup: int = key(100, "norms that are learnt from before any is called an outlier")
    relearn_after: int = key(5, "rounds in a row of outliers alone, after which norms are learnt anew")

    def __post_init__(self) -> None:
        check_guard(self)

    init = nothing_usual
    summary = own_norm
    weights = softmax_of_norms
    outer_step = clipped_step
    nobody_counts = relearnt
