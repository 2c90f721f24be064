"""How long does a second machine take, from the pasted line or the spoken words to its first training step?

    python -m tests.soak.newcomer

Two network namespaces behind lines of their own, real processes, and compiled code that is cached. Linux, root.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests.natlab.wires import Line
from tests.soak.swarm import PATIENCE, SoakPeer, SoakSwarm, Terms, clear


@dataclass(slots=True)
class Took:
    """Seconds after the line was entered."""

    answered: float = 0.0  # a status is there
    trained: float = 0.0  # an inner step was made
    contributed: float = 0.0  # a round with its update was committed


def enter(swarm: SoakSwarm, name: str, words: list[str]) -> Took:
    """On a machine of its own, which is new to the run."""
    host = swarm.lab.public(name, Line(up=swarm.terms.mbit, down=swarm.terms.mbit, delay=0.01))
    peer = SoakPeer(host, swarm.folder / name, words)
    swarm.peers.append(peer)
    began, took, nobody = time.monotonic(), Took(), threading.Event()
    peer.start()
    while not took.contributed:
        assert time.monotonic() - began < PATIENCE, peer.folder.with_suffix(".log").read_text()
        status, now = peer.status(), time.monotonic() - began
        took.answered = took.answered or (now if status.peer else 0.0)
        took.trained = took.trained or (now if status.inner_steps else 0.0)
        took.contributed = now if status.rounds_contributed else 0.0
        nobody.wait(0.1)
    return took


def spoken(swarm: SoakSwarm, relay: str) -> tuple[list[str], subprocess.Popen[str]]:
    """What a person would type, and the command that waits for it."""
    first = swarm.peers[0]
    command = ["invite", "--words", "--json", "--no-lan", "--relay", relay, "--out", str(first.folder)]
    waits = first.host.start(
        sys.executable, "-c", "from decentral.cli import main; main()", *command, stdout=subprocess.PIPE
    )
    assert waits.stdout is not None
    return ["join", json.loads(waits.stdout.readline())["words"], "--relay", relay], waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--preset", default="sparseloco")
    parser.add_argument("--out", type=Path, default=Path("soak-run"))
    given = parser.parse_args()
    terms = Terms(rounds=100_000, mbit=given.mbit, peers=1, preset=given.preset, hidden=128, alone=True)
    with SoakSwarm(clear(given.out.absolute()), terms) as swarm:
        invite = swarm.peers[0].status().invite
        relay_host = swarm.lab.public("relay")
        words = ["relay", "--listen", "/ip4/0.0.0.0/tcp/4001", "--identity", str(swarm.folder / "relay.key")]
        relay = relay_host.start(
            sys.executable, "-c", "from decentral.cli import main; main()", *words, stdout=subprocess.PIPE
        )
        assert relay.stdout is not None
        relay.stdout.readline()
        for repeat in range(given.repeats):
            print(f"pasted line {repeat}: {enter(swarm, f'pasted{repeat}', ['join', invite])}", flush=True)
            typed, waits = spoken(swarm, f"{relay_host.v4}")
            print(f"spoken words {repeat}: {enter(swarm, f'spoken{repeat}', typed)}", flush=True)
            assert waits.wait(PATIENCE) == 0
        relay.kill()


if __name__ == "__main__":
    main()
