"""Held-out loss in bits per byte: what a compressor built on the model would need."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from decentral.errors import DataError
from decentral.tasks.trained_model import TrainedModel


def held_out_windows(held_out: Tensor, *, context: int, num_windows: int) -> Tensor:
    """int64 (num_windows, context), evenly spread over the slice: the same for everybody, every time."""
    last_start = held_out.numel() - context
    if last_start < 0:
        raise DataError(
            f"the held-out slice has {held_out.numel()} bytes, one window needs {context}; "
            "name more text with --data or lower the context"
        )
    starts = [last_start * window // max(1, num_windows - 1) for window in range(num_windows)]
    return torch.stack([held_out[start : start + context] for start in starts]).long()


@torch.no_grad()
def bits_per_byte(model: Any, held_out: Tensor, *, context: int, num_windows: int = 128, batch_size: int = 16) -> float:
    """Mean loss of the model over fixed held-out windows, in bits per byte; 8.0 is knowing nothing.

    The model (``transformers``' causal interface, hence Any) is called in eval mode and left in the mode it
    was in.
    """
    windows = held_out_windows(held_out, context=context, num_windows=num_windows)
    batches = torch.split(windows, batch_size)
    device, training = next(model.parameters()).device, model.training
    model.eval()
    try:
        nats = math.fsum(_summed_loss(model, batch.to(device)) for batch in batches)
    finally:
        model.train(training)
    return nats / (windows.numel() - windows.shape[0]) / math.log(2)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A model on a text."""

    nats_per_token: float
    bits_per_byte: float  # comparable between models with other tokens
    num_tokens: int  # that were predicted


def evaluated(trained: TrainedModel, text_N: Tensor, *, num_windows: int = 128, batch_size: int = 16) -> Evaluated:
    """The loss of a trained model over fixed windows of a text, uint8 (N,): those that ``bits_per_byte`` takes.

    Raises DataError for a text shorter than what the model sees at once.
    """
    windows = held_out_windows(trained.tokenizer.tokens_of(text_N), context=trained.context, num_windows=num_windows)
    device = next(trained.module.parameters()).device
    with torch.no_grad():
        nats = math.fsum(_summed_loss(trained.module, batch.to(device)) for batch in torch.split(windows, batch_size))
    num_tokens = windows.numel() - windows.shape[0]
    nbytes = sum(trained.tokenizer.nbytes_of(window[1:].tolist()) for window in windows)
    return Evaluated(nats / num_tokens, nats / nbytes / math.log(2), num_tokens)


def _summed_loss(model: Any, batch: Tensor) -> float:
    """Nats over all predictions of the batch; float64 sum, so the batch size hardly shows."""
    logits = model(input_ids=batch).logits[:, :-1].float()
    each = cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1), reduction="none")
    return float(each.double().sum())
