"""The mixture of experts that takes an MLP's place in every block: of E experts each byte goes to the k likeliest.

p = softmax(W*x) ;  y = sum over the k largest p_e of p_e/s * expert_e(x) ;  s = their sum for k > 1, and 1 for k = 1
loss = cross entropy + 0.01*E*sum over e of f_e*P_e ;  f_e = choices of e for each byte, P_e = mean of p_e

The second term holds the load of the experts even. It is 0.01*k where they are used alike, and that much the training
loss is told too high; held-out losses leave it out. f and P are means over all blocks together, as ``transformers``
has it. No noise and no capacity: the same parameters and bytes go the same way, and none is dropped. With k = 1 the
likeliest is not divided by itself, or the router would learn from nothing but the balance.

An expert is 1/k as wide as the MLP of a Llama of the same size, so that a byte costs as much. The experts of a block
are one tensor, ``layers.0.mlp.experts.gate_up_proj``, whose first dimension counts them: there methods look for them.

Source: Muennighoff et al., "OLMoE: Open Mixture-of-Experts Language Models", 2024, arXiv:2409.02060; the balance:
Fedus, Zoph and Shazeer, "Switch Transformers", 2021, arXiv:2101.03961, equations 4 to 6, with their alpha.
"""

from collections.abc import Mapping
from typing import Any

from transformers import OlmoeConfig

from decentral.tasks.sizing import LanguageModelConfig

BALANCE_WEIGHT = 0.01
# An inner step of 690,528 parameters, one core: a loop over experts 82 ms, grouped_mm 145, batched_mm 1880.
_LOOP = "eager"


def olmoe_config(shared: Mapping[str, Any], config: LanguageModelConfig) -> OlmoeConfig:  # Any: keys of theirs
    """The ``transformers`` config of a mixture, from what it has in common with the Llama of its size."""
    return OlmoeConfig(
        **{**shared, "intermediate_size": config.expert_width},
        num_experts=config.experts,
        num_experts_per_tok=config.experts_per_token,
        norm_topk_prob=config.experts_per_token > 1,
        output_router_logits=True,
        router_aux_loss_coef=BALANCE_WEIGHT,
        experts_implementation=_LOOP,
    )
