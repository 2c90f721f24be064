"""A tensor of any shape, sent with error feedback as a round sends a fragment."""

from torch import Tensor

from decentral.compressors import Compressor, Payload
from decentral.compressors.feedback import ErrorFeedback


def compress_with_debt(
    compressor: Compressor, tensor: Tensor, debt: Tensor | None, beta: float
) -> tuple[Payload, Tensor]:
    """Return the payload, and the debt after it; ``debt``: before it, None: nothing."""
    state = {} if debt is None else {"debt": debt.flatten()}
    sending = ErrorFeedback(beta=beta).send(compressor, tensor.flatten(), state, (tuple(tensor.shape),))
    return sending.payloads[0], sending.state["debt"].view(tensor.shape)
