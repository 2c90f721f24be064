"""Pseudo-gradients of a real training run, as a SparseLoCo peer would compress them: debt included.

One peer, the demo's corpus and recipe on a model of 25.6 million parameters, most of them in matrices of 1 to 2.9
million; the error-fed pseudo-gradient of each parameter in the last round is what gets saved.

    OMP_NUM_THREADS=2 python experiments/compressors/collect.py pseudo_gradients.safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from decentral.compressors import parse_compressor
from decentral.compressors.feedback import ErrorFeedback
from decentral.tasks.batches import batch_at
from decentral.tasks.corpus import load_corpus
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import LanguageModelConfig

ROUNDS, STEPS, BETA = 6, 15, 0.95


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    out = arguments.parse_args().out
    corpus = load_corpus(None)
    config = LanguageModelConfig(hidden=1024, layers=2, heads=8, context=128)
    model = build_language_model(config, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    compressor = parse_compressor("topk(k=64, chunk=4096) >> signmag2")
    anchor = {name: p.detach().clone() for name, p in model.named_parameters()}
    debt: dict[str, torch.Tensor] = {}
    owed: dict[str, torch.Tensor] = {}
    for number in range(ROUNDS):
        for step in range(STEPS):
            batch = batch_at(
                corpus.train, seed=0, peer=bytes(32), step=number * STEPS + step, batch_size=4, context=config.context
            )
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        for name, p in model.named_parameters():
            gradient = anchor[name] - p.detach()
            owed[name] = BETA * debt.get(name, torch.zeros_like(gradient)) + gradient
            state = {} if name not in debt else {"debt": debt[name].flatten()}
            sending = ErrorFeedback(beta=BETA).send(compressor, gradient.flatten(), state, (tuple(gradient.shape),))
            (payload,), debt[name] = sending.payloads, sending.state["debt"].view_as(gradient)
            anchor[name] -= compressor.decompress_one(payload)
            p.data.copy_(anchor[name])
        print(f"round {number}: loss {loss.item():.3f}", flush=True)
    save_file({name: tensor.contiguous() for name, tensor in owed.items()}, out)


if __name__ == "__main__":
    main()
