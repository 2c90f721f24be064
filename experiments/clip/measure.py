"""What the median clip costs a clean run, what it saves one with a wrong peer, and how alike honest updates are.

Four peers in one process, the demo's model and corpus, the run's own codec, sums and outer step; no network. A gather
clips whole contributions, a reduce each of four parts by its slices. One JSON line per round, held-out bits per byte
every ``--every`` rounds.

    OMP_NUM_THREADS=1 python -m experiments.clip.measure --method sparseloco --clip --seed 0
    OMP_NUM_THREADS=1 python -m experiments.clip.measure --method diloco --wrong 0.5      # peer 3's learning rate
    OMP_NUM_THREADS=1 python -m experiments.clip.measure --method diloco --twin 0.01     # peer 3 trains as peer 2 does
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch
from torch import Tensor

from decentral.compressors import parse_compressor, parse_feedback
from decentral.manifest import Manifest, preset_manifest
from decentral.optimizers import RoundInfo, make_outer, mean_pseudo_gradient
from decentral.optimizers.aggregation.base import clip_scales, norm
from decentral.optimizers.aggregation.gram import cosines, sketch
from decentral.parameters import gather, scatter, schema_of
from decentral.replica.codec import Codec, range_shapes
from decentral.tasks.batches import batch_at
from decentral.tasks.corpus import load_corpus
from decentral.tasks.evaluate import bits_per_byte
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import DEMO_BETAS, LanguageModelConfig, demo_tables
from decentral.training.inner import warm_up

PEERS, PARTS = 4, 4


class Trainer:
    """One peer."""

    def __init__(self, manifest: Manifest, number: int, args: argparse.Namespace) -> None:
        model, inner = manifest.model, manifest.inner
        self.manifest, self.number, self.noise = manifest, number, 0.0
        sizes = {"hidden": model.hidden, "layers": model.layers, "heads": model.heads, "context": model.context}
        self.model = build_language_model(LanguageModelConfig(**sizes), seed=args.seed)
        self.parameters = dict(self.model.named_parameters())
        self.rate = args.wrong if args.wrong and number == PEERS - 1 else inner.learning_rate
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.rate, betas=DEMO_BETAS, weight_decay=inner.weight_decay
        )
        self.schedule = warm_up(self.optimizer, inner.warmup)
        self.data = bytes([number]) * 32
        if args.twin is not None and number == PEERS - 1:
            self.data, self.noise = bytes([number - 1]) * 32, args.twin
        self.generator = torch.Generator().manual_seed(number)
        self.debt: dict[str, Tensor] = {}

    def train(self, train: Tensor, begin: int, steps: int, seed: int) -> None:
        given = {"batch_size": self.manifest.data.batch_size, "context": self.manifest.model.context}
        for step in range(begin, begin + steps):
            self.model(**batch_at(train, seed=seed, peer=self.data, step=step, **given)).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.manifest.inner.clip)
            if self.noise:  # another machine rounds otherwise
                for parameter in self.model.parameters():
                    spread = self.noise * parameter.grad.square().mean().sqrt()
                    parameter.grad += spread * torch.randn(parameter.shape, generator=self.generator)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()


def gathered(codec: Codec, gradients: list[Tensor], trainers: list[Trainer], shapes, clip: bool):
    sent = []
    for gradient, trainer in zip(gradients, trainers, strict=True):
        encoded = codec.encode(gradient, trainer.debt, shapes)
        trainer.debt = encoded.feedback
        sent.append(codec.decode(encoded.body, shapes))
    scales = clip_scales([norm(one) for one in sent]) if clip else None
    named = [(bytes([n]) * 32, one, 1.0) for n, one in enumerate(sent)]
    return mean_pseudo_gradient(named, scales), sent


def reduced(codec: Codec, gradients: list[Tensor], clip: bool):
    numel, parts, all_sent = len(gradients[0]), [], []
    for part in range(PARTS):
        start, stop = part * numel // PARTS, (part + 1) * numel // PARTS
        shapes = range_shapes(start, stop)
        sent = [codec.decode(codec.encode(one[start:stop], {}, shapes).body, shapes) for one in gradients]
        scales = clip_scales([norm(one) for one in sent]) if clip else None
        mean = mean_pseudo_gradient([(bytes([n]) * 32, one, 1.0) for n, one in enumerate(sent)], scales)
        parts.append(codec.decode(codec.encode(mean, {}, shapes).body, shapes))
        all_sent.append(sent)
    return torch.cat(parts), [torch.cat(list(mine)) for mine in zip(*all_sent, strict=True)]


def seen(sent: list[Tensor]) -> dict[str, object]:
    norms = [norm(one) for one in sent]
    typical = statistics.median_low(norms)
    alike = cosines([sketch(one) for one in sent])
    pairs = [alike[i, j].item() for i in range(len(sent)) for j in range(i)]
    true = torch.nn.functional.cosine_similarity(sent[-1].double(), sent[-2].double(), dim=0).item()
    return {
        "times": [round(one / typical, 3) for one in norms],
        "mad": statistics.median(abs(one - typical) for one in norms) / typical,
        "last_pair": round(alike[-1, -2].item(), 4),
        "last_pair_true": round(true, 4),
        "largest_cosine": round(max(pairs), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="sparseloco")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--wrong", type=float)
    parser.add_argument("--twin", type=float)
    parser.add_argument("--batch", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    manifest = preset_manifest(args.method, **demo_tables(args.method))
    if args.batch:
        manifest = manifest.changed(data={"batch_size": args.batch})
    corpus, outer = load_corpus(), make_outer(manifest.outer.method, manifest.outer.hyper)
    codec = Codec(parse_compressor(manifest.compressor.chain), parse_feedback(manifest.compressor.feedback))
    trainers = [Trainer(manifest, number, args) for number in range(PEERS)]
    (fragment,) = schema_of(trainers[0].model, 1).fragments
    anchor = gather(trainers[0].parameters, fragment)
    state, told = outer.init(anchor), vars(args)
    for round_ in range(args.rounds):
        for trainer in trainers:
            trainer.train(corpus.train, round_ * manifest.inner.steps, manifest.inner.steps, args.seed)
        gradients = [anchor - gather(trainer.parameters, fragment) for trainer in trainers]
        if manifest.exchange.kind == "gather":
            mean, sent = gathered(codec, gradients, trainers, fragment.shapes, args.clip)
        else:
            mean, sent = reduced(codec, gradients, args.clip)
        anchor, state = outer.outer_step(anchor, {"change": mean}, state, RoundInfo())
        for trainer in trainers:
            scatter(anchor, fragment, trainer.parameters)
        row = {**told, "round": round_ + 1, **seen(sent)}
        if (round_ + 1) % args.every == 0:
            row["bits"] = round(
                bits_per_byte(trainers[0].model, corpus.held_out, context=manifest.model.context, num_windows=256), 4
            )
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
