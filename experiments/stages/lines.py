"""A replica of three stages on real lines: tokens a second, against what its lines and its stages allow.

    python -m experiments.stages.lines --mbit 20 --delay 0.0125 --forward 0.010 --steps 40
    python -m experiments.stages.lines --mbit 20 --delay 0.0125 --forward 0.060 --steps 20 --cap 1MB

As root on Linux; see docs/natlab.md for what it needs. A whole peer and three that share, each in a namespace of its
own. A stage's computing is a timer, so that four processes on two cores measure lines and waiting, and not the cores;
what crosses is what a model of ``--width`` has. Rounds go on meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import decentral
from decentral.manifest import preset_manifest
from decentral.pipeline.boundary import ROUNDINGS
from decentral.pipeline.lines import Form
from decentral.pipeline.turns import FAR, StageSpeed, busy_share, step_seconds
from decentral.training.part import Needs
from decentral.wire.groups import BOUNDARY

STAGES = 3
PAUSE = threading.Event()


class Timed(torch.autograd.Function):
    """Nothing, and the time of a stage's computing."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        PAUSE.wait(seconds)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        PAUSE.wait(2 * ctx.seconds)
        return gradient, None


class Block(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.gain, self.seconds = nn.Linear(width, width, bias=False), seconds

    def forward(self, states: Tensor) -> Tensor:
        narrow = self.gain(states[:, :1])  # weights to train, and little to compute
        return Timed.apply(states + 0.1 * narrow, self.seconds)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=20.0, help="each way, of every peer")
    parser.add_argument("--delay", type=float, default=0.0125, help="seconds one way, from a peer to the core")
    parser.add_argument("--forward", type=float, default=0.01, help="seconds of a stage and a micro-batch; back twice")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--inner", type=int, default=12, help="steps between two rounds of a fragment")
    parser.add_argument("--cap", default=None, help="of each stage's upload, as 1MB/s")
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- one peer ----


def work(given: argparse.Namespace) -> None:
    told = json.loads(given.worker)
    model = nn.Sequential(*(Block(given.width, given.forward) for _ in range(STAGES)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / given.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    one = Needs().in_files([given.width**2] * STAGES, range(1))
    shares = {"share": True, "memory": one, "max_upload": given.cap} if told["shares"] else {}
    manifest = preset_manifest(
        "diloco",
        run={"rounds": 10**6, "salt": "lines"},
        model={"task": "custom"},
        inner={"steps": STAGES * given.inner, "learning_rate": 1e-4, "weight_decay": 0.1},
        outer={"fragments": STAGES, "layout": "stages"},
        swarm={"deadline_floor": 30.0, "deadline_ceiling": 120.0},
    )
    net = {"listen": (told["listen"],), "transport": "native", "lan": False, "quiet": True, "alone": True}
    batch = torch.randn(given.micro_batches, given.tokens, given.width, generator=torch.Generator().manual_seed(2))
    classes = torch.zeros(given.micro_batches, given.tokens, dtype=torch.int64)  # as tokens are, two orders smaller
    with decentral.join(told.get("invite") or manifest, model, optimizer, out=told["out"], **net, **shares) as peer:
        say(invite=peer.invite)
        while not peer.done:
            loss = peer.gradients(batch, classes, lambda made, wanted: (made[..., 0] - wanted).square().mean())
            if loss is not None:
                optimizer.step()
                kinds = peer.swarm.transport.traffic.kinds
                sent = kinds[BOUNDARY].sent if BOUNDARY in kinds else 0
                total = peer.swarm.transport.traffic.total.sent
                say(at=time.monotonic(), step=peer.inner_steps, sent=sent, total=total, round=peer.round)
            optimizer.zero_grad()


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


# ---- all of them ----


def main() -> int:
    """See above."""
    given = options()
    if given.worker is not None:
        work(given)
        return 0
    from tests.natlab.lab import Lab
    from tests.natlab.namespaces import why_impossible
    from tests.natlab.wires import Line

    if why := why_impossible():
        print(f"error: {why}", file=sys.stderr)
        return 1
    with Lab() as lab, tempfile.TemporaryDirectory() as folder:
        line = Line(up=given.mbit, down=given.mbit, delay=given.delay)
        hosts = [lab.public(f"peer{number}", line) for number in range(1 + STAGES)]
        for host in hosts:
            host.sysctl("net/ipv4/tcp_congestion_control", "cubic")  # as Linux has it
        peers: list[subprocess.Popen[str]] = []
        try:
            invite = ""
            for number, host in enumerate(hosts):
                told = {"listen": f"/ip4/{host.v4}/tcp/4001", "out": f"{folder}/{number}", "shares": number > 0}
                command = [*command_of(given), "--worker", json.dumps({**told, "invite": invite})]
                peers.append(host.start(*command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE))
                invite = invite or str(read(peers[0])["invite"])
                print(f"peer {number} is up", file=sys.stderr, flush=True)
            rows = follow(peers[1:], given.steps)
            events = [json.loads(text) for text in Path(folder, "1", "events.jsonl").read_text().splitlines()]
        finally:
            for peer in peers:
                peer.kill()
                peer.wait()
    print(json.dumps(judge(given, rows, events), indent=1))
    return 0


def command_of(given: argparse.Namespace) -> list[str]:
    skipped = ("worker", "cap") if given.cap is None else ("worker",)
    named = {name.replace("_", "-"): value for name, value in vars(given).items() if name not in skipped}
    return [sys.executable, "-m", "experiments.stages.lines", *(f"--{name}={value}" for name, value in named.items())]


def read(peer: subprocess.Popen[str]) -> dict[str, Any]:
    assert peer.stdout is not None
    line = peer.stdout.readline()
    if not line:
        raise SystemExit(f"a peer ended with {peer.wait()}")
    return json.loads(line)


def follow(peers: Sequence[subprocess.Popen[str]], steps: int) -> list[list[dict[str, Any]]]:
    """The steps of each, from its second on: the first may begin late."""
    rows: list[list[dict[str, Any]]] = [[] for _ in peers]

    def run(number: int) -> None:
        while len(rows[number]) < steps + 1:
            told = read(peers[number])
            rows[number] += [told] if "step" in told else []

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(peers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rows


def judge(given: argparse.Namespace, rows: list[list[dict[str, Any]]], events: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens a second over the steps in which no round was waited for, and what they might have been."""
    formed = next(event for event in events if event["event"] == "group_formed")
    rounding = next(one for one in ROUNDINGS if type(one).__name__.lower() == formed["rounding"])
    shape = (1, given.tokens, given.width)
    nbytes, rate = Form(shape, torch.float32, rounding).nbytes, given.mbit * 1.25e5
    first = rows[0]
    took = [after["at"] - before["at"] for before, after in pairwise(first)]
    plain = sorted(s for s, row in zip(took, first[1:], strict=True) if row["step"] % given.inner != 1)
    seconds = plain[len(plain) // 2]
    stage, line = 3 * given.forward, 2 * nbytes / rate
    speed = [StageSpeed(given.forward, 2 * given.forward, nbytes / rate, 2 * given.delay)] * STAGES
    count, tokens = given.micro_batches, given.micro_batches * given.tokens
    allowed = tokens / (count * max(stage, line)) * busy_share(STAGES, count)
    commits = [event["seconds"] for event in events if event["event"] == "commit"]
    caps = {}
    if given.cap is not None:
        spans = [(row[-1]["total"] - row[0]["total"]) / (row[-1]["at"] - row[0]["at"]) for row in rows]
        caps = {"cap": given.cap, "sent_a_second": [round(span) for span in spans]}
    return {
        "rounding": formed["rounding"],
        "nbytes_a_micro_batch": nbytes,
        "step_seconds": round(seconds, 3),
        "slowest_steps": [round(s, 2) for s in sorted(took)[-4:]],
        "tokens_a_second": round(tokens / seconds),
        "allowed": round(allowed),
        "share_of_allowed": round(tokens / seconds / allowed, 3),
        "forecast_seconds": round(step_seconds(speed, count, FAR), 3),
        "stage_seconds": stage,
        "line_seconds": round(line, 4),
        "rounds": len(commits),
        "round_seconds": [round(s, 2) for s in commits[-5:]],
        **caps,
    }


if __name__ == "__main__":
    sys.exit(main())
