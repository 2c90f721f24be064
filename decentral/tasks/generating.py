"""What a causal language model says next, token by token.

Every token costs a forward pass over all that the model sees: to look at a model, and not to serve it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Shape suffixes: T = tokens so far, V = vocabulary.


def continued(
    module: Any,  # transformers' causal interface; it ships no types
    prompt_T: Tensor,
    *,
    num_tokens: int,
    context: int,
    temperature: float,
    generator: torch.Generator,
) -> Iterator[int]:
    """Yield ``num_tokens`` tokens after the prompt (T >= 1), of which the last ``context`` are seen.

    ``temperature`` 0 takes the likeliest each time; else it divides the logits, and one is drawn by ``generator``, the
    processor's, so that a seed gives the same text wherever the logits are the same.
    """
    token_T = prompt_T
    for _ in range(num_tokens):
        with torch.no_grad():
            logits_V = module(input_ids=token_T[None, -context:]).logits[0, -1].float().cpu()
        drawn = _drawn(logits_V, temperature, generator)
        token_T = torch.cat([token_T, drawn.to(token_T.device)])
        yield int(drawn)


def _drawn(logits_V: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits_V.argmax(dim=-1, keepdim=True)
    return torch.multinomial(torch.softmax(logits_V / temperature, dim=-1), 1, generator=generator)
