"""A replica of three stages on real lines: tokens a second, against what its lines and its stages allow.

    python -m experiments.stages.lines --mbit 20 --delay 0.0125 --forward 0.010 --steps 40
    python -m experiments.stages.lines --mbit 20 --delay 0.0125 --forward 0.060 --steps 20 --cap 1MB
    python -m experiments.stages.lines --mbit 20 --delay 0.0125 --forward 0.010 --steps 40 --nat

As root on Linux; see docs/natlab.md for what it needs. A whole peer and three that share, each in a namespace of its
own. A stage's computing is a timer, so that four processes on two cores measure lines and waiting, and not the cores;
what crosses is what a model of ``--width`` has. Rounds go on meanwhile. With ``--nat`` the three that share are behind
NATs that cannot be punched, and all between them goes through one ``decentral relay``: once in and once out.
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
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import decentral
from decentral.manifest import preset_manifest
from decentral.pipeline.boundary import ROUNDINGS
from decentral.pipeline.lines import Form, StageLines
from decentral.pipeline.turns import FAR, StageSpeed, Turn, busy_share, step_seconds
from decentral.training.part import Needs
from decentral.wire.groups import BOUNDARY
from decentral.wire.keys import peer_name
from tests.natlab.flows import between
from tests.natlab.lab import Host, Lab
from tests.natlab.namespaces import why_impossible
from tests.natlab.nat import SYMMETRIC
from tests.natlab.relay import RelaySeat
from tests.natlab.wires import Line

STAGES = 3
WIRE = 1 + 1.5 * 52 / 1448  # TCP's and IP's headers, and an acknowledgement for every other packet that comes
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


class Clock:
    """The seconds that the turns of this process's stage take, packing and posting included, as they are."""

    def __init__(self) -> None:
        self.spent: dict[bool, list[float]] = {True: [], False: []}
        self._turn: Turn | None = None
        self._began, self._wait = 0.0, StageLines.first_here

    @property
    def means(self) -> list[float]:
        """Forward and back."""
        return [sum(spent) / max(1, len(spent)) for spent in (self.spent[True], self.spent[False])]

    async def first_here(self, lines: StageLines, turns: Sequence[Turn]) -> Turn:
        if self._turn is not None:
            self.spent[self._turn.forward].append(time.monotonic() - self._began)
        turn = await self._wait(lines, turns)
        is_last = turn == Turn(False, lines._inbox.record.micro_batches - 1)  # others are waited for then
        self._turn, self._began = None if is_last else turn, time.monotonic()
        return turn


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=20.0, help="each way, of every peer")
    parser.add_argument("--delay", type=float, default=0.0125, help="seconds one way, from a peer to the core")
    parser.add_argument("--forward", type=float, default=0.01, help="seconds of a stage and a micro-batch; back twice")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128, help="of a micro-batch")
    parser.add_argument(
        "--samples", type=int, default=12, help="of a batch: 12 and 24 make 12 micro-batches, 23 makes 23"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--inner", type=int, default=12, help="steps between two rounds of a fragment")
    parser.add_argument("--cap", default=None, help="of each stage's upload, as 1MB/s")
    parser.add_argument("--nat", action="store_true", help="the three that share meet through a relay only")
    parser.add_argument("--relay-mbit", type=float, default=200.0, help="each way, of the relay")
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- one peer ----


def work(given: argparse.Namespace) -> None:
    # Four processes on two cores: packing a state took 18 ms with threads that wait for each other, 0.1 with one.
    torch.set_num_threads(1)
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
        # Leases are renewed often: each tells how long a small message takes.
        swarm={"deadline_floor": 30.0, "deadline_ceiling": 120.0, "lease": 6.0},
    )
    net = {"listen": (told["listen"],), "transport": "native", "lan": False, "quiet": True, "alone": True}
    net["relays"] = tuple(told["relays"])
    clock = Clock()
    StageLines.first_here = lambda lines, turns: clock.first_here(lines, turns)  # type: ignore[method-assign]
    batch = torch.randn(given.samples, given.tokens, given.width, generator=torch.Generator().manual_seed(2))
    classes = torch.zeros(given.samples, given.tokens, dtype=torch.int64)  # as tokens are, two orders smaller
    with decentral.join(told.get("invite") or manifest, model, optimizer, out=told["out"], **net, **shares) as peer:
        say(invite=peer.invite)
        while not peer.done:
            loss = peer.gradients(batch, classes, lambda made, wanted: (made[..., 0] - wanted).square().mean())
            if loss is not None:
                optimizer.step()
                kinds = peer.swarm.transport.traffic.kinds
                sent = kinds[BOUNDARY].sent if BOUNDARY in kinds else 0
                total = peer.swarm.transport.traffic.total.sent
                answers = {peer_name(one)[-8:]: s for one, s in peer.swarm.node.directory.answer_seconds.items()}
                say(
                    at=time.monotonic(),
                    step=peer.inner_steps,
                    sent=sent,
                    total=total,
                    answers=answers,
                    turns=clock.means,
                )
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
    if why := why_impossible():
        print(f"error: {why}", file=sys.stderr)
        return 1
    with Lab() as lab, tempfile.TemporaryDirectory() as folder:
        hosts, relay = place(lab, given, Path(folder))
        peers: list[subprocess.Popen[str]] = []
        try:
            invite, relays = "", [] if relay is None else [relay.address]
            for number, host in enumerate(hosts):
                listen = f"/ip4/{'0.0.0.0' if relay is not None and number else host.v4}/tcp/4001"
                told = {"listen": listen, "out": f"{folder}/{number}", "shares": number > 0, "relays": relays}
                command = [*command_of(given), "--worker", json.dumps({**told, "invite": invite})]
                peers.append(host.start(*command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE))
                invite = invite or str(read(peers[0])["invite"])
                print(f"peer {number} is up", file=sys.stderr, flush=True)
            rows = follow(peers[1:], given.steps)
            flows = lab.flows()
            events = [json.loads(text) for text in Path(folder, "1", "events.jsonl").read_text().splitlines()]
        finally:
            for peer in peers:
                peer.kill()
                peer.wait()
            if relay is not None:
                relay.kill()
    found, homes = judge(given, rows, events), [host.number for host in hosts[1:]]
    if relay is not None:
        directly = sum(between(flows, [one], [other]) for one, other in combinations(homes, 2))
        found |= {"relayed_mb": round(1e-6 * between(flows, homes, [relay.number]), 1), "direct_mb": 1e-6 * directly}
    print(json.dumps(found, indent=1))
    return 0


def place(lab: Lab, given: argparse.Namespace, folder: Path) -> tuple[list[Host], RelaySeat | None]:
    """Seat the peers, the whole one first, and the relay where there is one."""
    line, relay = Line(up=given.mbit, down=given.mbit, delay=given.delay), None
    hosts = [lab.public("peer0", line)]
    for number in range(1, 1 + STAGES):
        if given.nat:
            hosts.append(lab.household(f"home{number}", SYMMETRIC, line).host(f"peer{number}"))
        else:
            hosts.append(lab.public(f"peer{number}", line))
    if given.nat:
        hosts.append(lab.public("relay", Line(up=given.relay_mbit, down=given.relay_mbit, delay=given.delay)))
    for host in hosts:
        host.sysctl("net/ipv4/tcp_congestion_control", "cubic")  # as Linux has it
    if given.nat:
        relay = RelaySeat(hosts.pop(), folder / "relay")
        relay.start()
    return hosts, relay


def command_of(given: argparse.Namespace) -> list[str]:
    said = {name.replace("_", "-"): value for name, value in vars(given).items() if type(value) in (int, float, str)}
    return [sys.executable, "-m", "experiments.stages.lines", *(f"--{name}={value}" for name, value in said.items())]


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
    count = formed["micro_batches"]
    shape = (given.samples // count, given.tokens, given.width)
    nbytes, rate = Form(shape, torch.float32, rounding).nbytes, given.mbit * 1.25e5
    first = rows[0]
    took = [after["at"] - before["at"] for before, after in pairwise(first)]
    plain = sorted(s for s, row in zip(took, first[1:], strict=True) if row["step"] % given.inner != 1)
    seconds = plain[len(plain) // 2]
    stage, line = 3 * given.forward, 2 * nbytes / rate
    relay = 2 * (STAGES - 1) * nbytes / (given.relay_mbit * 1.25e5) if given.nat else 0.0
    hops = 4 if given.nat else 2
    turns = [sum(row[-1]["turns"][way] for row in rows) / STAGES for way in range(2)]
    speed = [StageSpeed(*turns, nbytes * WIRE / rate, hops * given.delay)] * STAGES
    tokens = given.samples * given.tokens
    allowed = tokens / (count * max(stage, line, relay)) * busy_share(STAGES, count)
    carried = tokens / (count * max(stage, line * WIRE, relay * WIRE)) * busy_share(STAGES, count)
    commits = [event for event in events if event["event"] == "commit"]
    whole = [event for event in commits if event["mono"] > formed["mono"]][1:]  # the first may be of before
    # What the first row tells was measured before.
    before = {s for row in rows for s in row[0]["answers"].values()}
    answers = sorted({s for row in rows for one in row for s in one["answers"].values()} - before)
    caps = {}
    if given.cap is not None:
        spans = [(row[-1]["total"] - row[0]["total"]) / (row[-1]["at"] - row[0]["at"]) for row in rows]
        caps = {"cap": given.cap, "sent_a_second": [round(span) for span in spans]}
    return {
        "rounding": formed["rounding"],
        "micro_batches": count,
        "nbytes_a_micro_batch": nbytes,
        "step_seconds": round(seconds, 3),
        "slowest_steps": [round(s, 2) for s in sorted(took)[-4:]],
        "tokens_a_second": round(tokens / seconds),
        "allowed": round(allowed),
        "share_of_allowed": round(tokens / seconds / allowed, 3),
        "share_of_what_tcp_carries": round(tokens / seconds / carried, 3),
        "forecast_seconds": round(step_seconds(speed, count, FAR), 3),
        "turn_seconds": [round(s, 4) for s in turns],
        "stage_seconds": stage,
        "line_seconds": round(line, 4),
        "relay_seconds": round(relay, 4),
        "rounds": len(commits),
        "round_seconds": [round(event["seconds"], 2) for event in commits[-5:]],
        "fewest_contributors": min((len(event["contributors"]) for event in whole), default=None),
        "ballots": max((event.get("ballot") or 0 for event in whole), default=None),
        "small_messages": {"count": len(answers), "median": _at(answers, 0.5), "worst": _at(answers, 1.0)},
        **caps,
    }


def _at(ordered: Sequence[float], share: float) -> float | None:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else None


if __name__ == "__main__":
    sys.exit(main())
