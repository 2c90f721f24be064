"""Train K replicas in one process with the real outer optimizers and compressors; print held-out bits per byte.

No network: frames are compressed and decompressed as the swarm would, and applied ``tau`` inner steps later. What
is evaluated is the shared anchor (NoLoCo: the mean of the slow weights; solo: the model). Defaults are the demo's own
settings, so a line without options is a row of the table in README.md. One JSON line per evaluation.

    OMP_NUM_THREADS=1 python experiments/demo_tuning/simulate.py --method sparseloco
"""

import argparse
import json
import random
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decentral.compressors import parse_compressor, parse_feedback
from decentral.compressors.feedback import ErrorFeedback
from decentral.manifest import preset_manifest
from decentral.optimizers import RoundInfo, blend, carry, make_outer, mean_pseudo_gradient, presets
from decentral.parameters import Fragment, gather, scatter, schema_of, split
from decentral.tasks.batches import batch_at
from decentral.tasks.corpus import load_corpus
from decentral.tasks.evaluate import bits_per_byte
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import DEMO_BATCH_SIZE, DEMO_BETAS, DEMO_INNER, DEMO_MODEL, LanguageModelConfig, demo_tables
from decentral.training.inner import warm_up


@dataclass
class Replica:
    """One peer: its model and inner optimizer, and per fragment its feedback and what it contributed last."""

    peer: bytes
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    parameters: dict[str, Tensor]
    feedback: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    contributed: dict[int, Tensor] = field(default_factory=dict)
    slow: Tensor = field(default_factory=lambda: torch.empty(0))  # NoLoCo only, with its momentum
    state: dict[str, Tensor] = field(default_factory=dict)


def make_replica(args: argparse.Namespace, number: int) -> Replica:
    model = build_language_model(LanguageModelConfig(**args.model), seed=args.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=DEMO_BETAS, weight_decay=DEMO_INNER["weight_decay"]
    )
    schedule = warm_up(optimizer, args.warmup)
    return Replica(number.to_bytes(32, "little"), model, optimizer, schedule, dict(model.named_parameters()))


def inner_step(replica: Replica, train: Tensor, step: int, args: argparse.Namespace) -> None:
    sizes = {"batch_size": args.batch, "context": args.model["context"]}
    replica.model(**batch_at(train, seed=args.seed, peer=replica.peer, step=step, **sizes)).loss.backward()
    torch.nn.utils.clip_grad_norm_(replica.model.parameters(), DEMO_INNER["clip"])
    replica.optimizer.step()
    replica.schedule.step()
    replica.optimizer.zero_grad()


class Swarm:
    """The synchronous family: one anchor per fragment, equal at all replicas."""

    def __init__(self, args: argparse.Namespace, replicas: list[Replica]) -> None:
        self.args, self.replicas = args, replicas
        self.fragments = schema_of(replicas[0].model, args.fragments).fragments
        self.anchor = {f.index: gather(replicas[0].parameters, f) for f in self.fragments}
        self.outer = make_outer(args.method, args.hyper)
        self.state = {index: self.outer.init(anchor) for index, anchor in self.anchor.items()}
        self.compressor = parse_compressor(args.compressor)
        self.update: dict[int, Tensor] = {}

    def after_step(self, done: int) -> None:
        """Send and merge what is due; fragment p is due H/P inner steps after fragment p - 1."""
        for fragment in self.fragments:
            offset = (fragment.index + 1) * self.args.h // len(self.fragments)
            if done >= offset and (done - offset) % self.args.h == 0:
                self.send(fragment)
            since = done - offset - self.args.tau
            if fragment.index in self.update and since >= 0 and since % self.args.h == 0:
                self.merge(fragment)

    def send(self, fragment: Fragment) -> None:
        sent = [(replica.peer, self.contribution(replica, fragment), 1.0) for replica in self.replicas]
        mean = mean_pseudo_gradient(sent)
        if self.args.exchange == "reduce":  # the owner of a part returns one re-quantised result
            mean = self.through(mean, fragment)
        self.update[fragment.index] = mean

    def contribution(self, replica: Replica, fragment: Fragment) -> Tensor:
        """What the others decode of this replica's pseudo-gradient; its debt is booked."""
        index = fragment.index
        replica.contributed[index] = gather(replica.parameters, fragment)
        delta = self.anchor[index] - replica.contributed[index]
        if self.args.beta is None:
            return self.through(delta, fragment)
        feedback, state = ErrorFeedback(beta=self.args.beta), replica.feedback.get(index, {})
        sending = feedback.send(self.compressor, delta, state, fragment.shapes)
        replica.feedback[index] = sending.state
        return torch.cat([self.compressor.decompress_one(payload).flatten() for payload in sending.payloads])

    def through(self, flat: Tensor, fragment: Fragment) -> Tensor:
        parts = split(flat, fragment)
        return torch.cat(
            [self.compressor.decompress_one(self.compressor.compress_one(part)).flatten() for part in parts]
        )

    def merge(self, fragment: Fragment) -> None:
        index = fragment.index
        received, info = {"change": self.update.pop(index)}, RoundInfo()
        self.anchor[index], self.state[index] = self.outer.outer_step(
            self.anchor[index], received, self.state[index], info
        )
        for replica in self.replicas:
            live = gather(replica.parameters, fragment)
            if index not in replica.contributed:  # came while the round was in flight
                replica.contributed[index] = live
            merged = merge(live, replica.contributed[index], self.anchor[index], self.args.alpha)
            scatter(merged, fragment, replica.parameters)

    def load_into(self, model: torch.nn.Module) -> None:
        for fragment in self.fragments:
            scatter(self.anchor[fragment.index], fragment, dict(model.named_parameters()))


def merge(live: Tensor, contributed: Tensor, anchor: Tensor, alpha: float | None) -> Tensor:
    return carry(live, contributed, anchor) if alpha is None else blend(live, anchor, alpha)


class Gossip:
    """NoLoCo: a fresh random partner each round, slow weights per replica, never equal."""

    def __init__(self, args: argparse.Namespace, replicas: list[Replica]) -> None:
        self.args, self.replicas, self.random = args, replicas, random.Random(args.seed)
        (self.fragment,) = schema_of(replicas[0].model).fragments
        self.outer = make_outer(args.method, args.hyper)
        self.compressor = parse_compressor(args.compressor)
        for replica in replicas:
            replica.slow = gather(replica.parameters, self.fragment)
            replica.state = self.outer.init(replica.slow)

    def after_step(self, done: int) -> None:
        if done % self.args.h == 0:
            order = self.random.sample(self.replicas, len(self.replicas))
            self.pairs = list(zip(order[::2], order[1::2], strict=False))  # an odd one out waits
            self.sent = {replica.peer: self.send(replica) for replica in self.replicas}
        if done >= self.args.h and done % self.args.h == self.args.tau:
            for pair in self.pairs:
                self.pair_step(pair)

    def send(self, replica: Replica) -> tuple[Tensor, Tensor]:
        replica.contributed[0] = gather(replica.parameters, self.fragment)
        return self.through(replica.contributed[0] - replica.slow), self.through(replica.slow)

    def through(self, flat: Tensor) -> Tensor:
        parts = split(flat, self.fragment)
        return torch.cat(
            [self.compressor.decompress_one(self.compressor.compress_one(part)).flatten() for part in parts]
        )

    def pair_step(self, pair: tuple[Replica, Replica]) -> None:
        (delta, slow), (other_delta, other_slow) = (self.sent[replica.peer] for replica in pair)
        mean_delta = (delta + other_delta) / 2
        for replica, rows in zip(pair, ((slow, other_slow), (other_slow, slow)), strict=True):
            received = {"change": mean_delta, "slow": torch.stack(rows)}
            replica.slow, replica.state = self.outer.outer_step(replica.slow, received, replica.state, RoundInfo())
            live = gather(replica.parameters, self.fragment)
            merged = merge(live, replica.contributed[0], replica.slow, self.args.alpha)
            scatter(merged, self.fragment, replica.parameters)

    def load_into(self, model: torch.nn.Module) -> None:
        mean = torch.stack([replica.slow for replica in self.replicas]).mean(0)
        scatter(mean, self.fragment, dict(model.named_parameters()))

    def disagreement(self) -> float:
        """Root mean square distance of a replica from the mean, relative to the mean's norm."""
        stack = torch.stack([replica.slow for replica in self.replicas])
        return float((stack - stack.mean(0)).norm(dim=1).pow(2).mean().sqrt() / stack.mean(0).norm())


def churn(args: argparse.Namespace, swarm: Swarm | Gossip, replicas: list[Replica], done: int) -> None:
    """The demo's faults: one peer is gone after a third of the steps, a new one starts from the anchor at half."""
    if done == args.steps // 3:
        replicas.pop(1)
    if done == args.steps // 2:
        newcomer = make_replica(args, args.peers)
        swarm.load_into(newcomer.model)
        if isinstance(swarm, Gossip):
            newcomer.slow = gather(newcomer.parameters, swarm.fragment)
            newcomer.state = swarm.outer.init(newcomer.slow)
        replicas.append(newcomer)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["solo", *presets()], required=True)
    parser.add_argument("--set", default="{}", help='JSON over the method\'s demo settings, e.g. {"h": 30, "tau": 2}')
    parser.add_argument("--model", default="{}", help="JSON over DEMO_MODEL")
    parser.add_argument("--lr", type=float, help="inner learning rate; default the method's")
    parser.add_argument("--batch", type=int, default=DEMO_BATCH_SIZE)
    parser.add_argument("--warmup", type=int, default=DEMO_INNER["warmup"])
    for name, default in [("peers", 4), ("steps", 500), ("seed", 0), ("eval-every", 100), ("windows", 256)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--churn", action="store_true", help="lose one peer at a third, gain one at half")
    args = parser.parse_args()
    args.model = {**DEMO_MODEL, **json.loads(args.model)}
    settings = {} if args.method == "solo" else demo_settings(args.method)
    default_lr = settings.pop("lr", DEMO_INNER["learning_rate"])
    args.lr = args.lr or default_lr
    for name, value in {**settings, **json.loads(args.set)}.items():
        setattr(args, name, value)
    return args


def demo_settings(method: str) -> dict[str, object]:
    """What the demo's manifest of this method says, in this script's words."""
    manifest = preset_manifest(method, **demo_tables(method))
    outer, hyper = manifest.outer, manifest.outer.hyper
    return {
        "lr": manifest.inner.learning_rate,
        "h": manifest.inner.steps,
        "tau": outer.overlap,
        "alpha": hyper.get("alpha") if method == "streaming" else None,  # how merge weighs the live copy
        "fragments": outer.fragments,
        "exchange": manifest.exchange.kind,
        "compressor": manifest.compressor.chain,
        "beta": getattr(parse_feedback(manifest.compressor.feedback), "beta", None),
        "hyper": hyper,
    }


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    setting = json.dumps({key: value for key, value in vars(args).items() if key != "method"})
    print(json.dumps({"method": args.method, "setting": setting}), flush=True)
    corpus = load_corpus()
    replicas = [make_replica(args, number) for number in range(1 if args.method == "solo" else args.peers)]
    probe = build_language_model(LanguageModelConfig(**args.model), seed=args.seed)
    swarm = (
        None if args.method == "solo" else Gossip(args, replicas) if args.method == "noloco" else Swarm(args, replicas)
    )
    started = time.monotonic()
    for done in range(1, args.steps + 1):
        if swarm and args.churn:
            churn(args, swarm, replicas, done)
        for replica in replicas:
            inner_step(replica, corpus.train, done - 1, args)
        if swarm:
            swarm.after_step(done)
        if done % args.eval_every:
            continue
        if swarm:
            swarm.load_into(probe)
        model = probe if swarm else replicas[0].model
        sizes = {"context": args.model["context"], "num_windows": args.windows}
        line = {"step": done, "bits_per_byte": round(bits_per_byte(model, corpus.held_out, **sizes), 4)}
        if isinstance(swarm, Gossip):
            line["disagreement"] = round(swarm.disagreement(), 4)
        line["s_per_inner_step"] = round((time.monotonic() - started) / done / len(replicas), 3)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
