"""Two peers of a large model: seconds of a round, and bytes of memory a parameter beside the model.

python -m experiments.holding.large --million 67 --fragments 8
python -m experiments.holding.large --million 1000 --fragments 8 --dtype bfloat16 --offload /var/tmp/large --rounds 10
python -m experiments.holding.large --million 134 --fragments 4 --memory 1.7GB
python -m experiments.holding.large --million 134 --fragments 4 --memory 1.83GB --share 4 --group a --group b ...

An inner step moves every parameter by chance and needs no gradient, so that what is measured is the rounds'. With
``--memory``, which the second peer has, both train by AdamW, in stages; with ``--share`` so many peers beside the first
have it, and are one replica. The last round is followed by the end of both
processes: what they would write then is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import decentral
from decentral.manifest import Manifest, preset_manifest

WIDTH = 1024
JOIN = 900.0  # s for the second peer to have the model


class Wandering(torch.optim.Optimizer):
    """Every parameter takes a random step of a thousandth."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__(model.parameters(), {"lr": 1e-3})
        self._chance = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """One for all tensors: drawn once, and turned over for every second one."""
        step = torch.randn(WIDTH, WIDTH, generator=self._chance)
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            parameter.add_(step.to(parameter.dtype), alpha=1e-3 if number % 2 else -1e-3)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=float, default=67.0, help="parameters")
    parser.add_argument("--fragments", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=16, help="outer steps, each of one fragment")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--offload", type=Path, default=None)
    parser.add_argument("--memory", default=None, help="of the second peer, as 1.7GB")
    parser.add_argument(
        "--group",
        type=Path,
        default=[],
        action="append",
        help="a memory control group, one for each peer but the first",
    )
    parser.add_argument("--share", type=int, default=0, help="peers that are one replica beside the first")
    parser.add_argument("--seat", type=int, default=None, help="one of the two peers")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--invite", default=None)
    return parser.parse_args()


def main() -> None:
    """See above."""
    given = options()
    if given.seat is not None:
        take_part(given)
        return
    with tempfile.TemporaryDirectory(dir=given.offload) as folder:
        peers = [start(given, Path(folder), 0, None)]
        invite = said(peers[0])["invite"]
        for seat in range(1, 1 + max(1, given.share)):
            peers.append(start(given, Path(folder), seat, invite))
            if given.group:
                (given.group[seat - 1] / "cgroup.procs").write_text(str(peers[seat].pid))
        try:
            for _ in range(given.rounds):
                print(json.dumps([said(peer) for peer in peers]), flush=True)
        finally:
            for peer in peers:
                peer.kill()
                peer.wait()


def start(given: argparse.Namespace, folder: Path, seat: int, invite: str | None) -> subprocess.Popen[str]:
    """One peer as a process of its own."""
    command = [sys.executable, "-m", "experiments.holding.large", "--seat", str(seat), "--folder", str(folder)]
    for name in ("million", "fragments", "rounds", "dtype", "offload", "memory", "share"):
        command += [f"--{name}", str(getattr(given, name))] if getattr(given, name) is not None else []
    command += [] if invite is None else ["--invite", invite]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def said(peer: subprocess.Popen[str]) -> dict[str, object]:
    """The next line of a peer."""
    assert peer.stdout is not None
    line = peer.stdout.readline()
    if not line:
        raise SystemExit("a peer ended; its error is above")
    return dict(json.loads(line))


def terms(given: argparse.Namespace) -> Manifest:
    """A run of both or none."""
    return preset_manifest(
        "sparseloco",
        run={"rounds": 10_000, "salt": "large"},
        inner={"steps": given.fragments, "warmup": 0},
        outer={"fragments": given.fragments, "layout": "stages"},
        swarm={"min_peers": 2, "lease": 60.0},
    )


def take_part(given: argparse.Namespace) -> None:
    """Train until killed, and say after each round what it took."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(round(given.million * 1e6 / WIDTH**2))]
    model = nn.Sequential(*layers).to(getattr(torch, given.dtype))
    numel, before = sum(map(torch.numel, model.parameters())), memory()
    optimizer = Wandering(model, given.seat) if given.memory is None else torch.optim.AdamW(model.parameters(), lr=1e-4)
    where = {"out": given.folder / str(given.seat), "listen": ("/ip4/127.0.0.1/tcp/0",), "lan": False}
    settings = {"quiet": True, "checkpoint_every": 10_000, "join_timeout": JOIN, "offload": given.offload}
    settings["memory"] = given.memory if given.seat else None
    settings["share"] = bool(given.share and given.seat)
    with decentral.join(given.invite or terms(given), model, optimizer, **where, **settings, alone=True) as peer:
        if given.invite is None:
            say(invite=peer.invite)
        peer.wait_for_company()
        began, made = time.monotonic(), peer.round
        while not peer.done:
            inputs, loss = torch.randn(4, WIDTH), None
            if given.memory is not None:
                optimizer.zero_grad()
                loss = peer.gradients(inputs, inputs, lambda made, wanted: made.square().mean())
            if given.memory is None or loss is not None:
                optimizer.step()
            if peer.round > made:
                most = {name: round((kept - before[name]) / numel, 2) for name, kept in memory().items()}
                seconds = round(time.monotonic() - began, 2)
                say(round=peer.round, seconds=seconds, a_parameter=most, megabytes=memory()["VmHWM"] // 10**6)
                began, made = time.monotonic(), peer.round


def memory() -> dict[str, int]:
    """Bytes of this process: the most that it had at once, and what it has now in memory and in files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: 1024 * int(lines[name].split()[0]) for name in ("VmHWM", "RssAnon", "RssFile")}


def say(**line: object) -> None:
    """To the process that started this one."""
    os.write(1, f"{json.dumps(line)}\n".encode())


if __name__ == "__main__":
    main()
