"""Three machines that are too small for a model are one replica of it, beside one that is not: try it on this one.

    python examples/small_machines.py

As root on Linux each is in a network namespace of its own behind a line of 20 Mbit/s, all of which are removed at the
end; else they are processes on loopback. Machines of your own type the lines that begin with $ here, INVITE filled in.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which

LINE = "tbf rate 20mbit burst 32k latency 100ms"
SMALL = "--share --memory 911MB"  # Python and torch take 900, a third of the model 8 more, two thirds 14


@contextmanager
def machines(count: int) -> Iterator[list[tuple[str, str]]]:
    """Have so many on one switch: what their commands begin with, and their addresses. They are removed at the end."""
    *names, switch = (f"decentral{os.getpid()}.{number}" for number in range(count + 1))
    if which("tc") is None or subprocess.run(["ip", "netns", "add", switch], stderr=subprocess.DEVNULL).returncode:
        print("network namespaces need root, Linux, ip and tc: these machines are processes on loopback", flush=True)
        yield [("", "127.0.0.1")] * count
        return
    try:
        run(f"ip -n {switch} link add bridge up type bridge")
        for number, name in enumerate(names):
            run(f"ip netns add {name}")
            run(f"ip -n {name} link add line type veth peer name port{number} netns {switch}")
            run(f"ip -n {name} address add 10.77.0.{number + 1}/24 dev line")
            run(f"ip -n {name} link set line up")
            run(f"ip -n {switch} link set port{number} master bridge up")
            run(f"tc -n {name} qdisc add dev line root {LINE}")
            run(f"tc -n {switch} qdisc add dev port{number} root {LINE}")
        yield [(f"ip netns exec {name}", f"10.77.0.{number + 1}") for number, name in enumerate(names)]
    finally:
        for name in (*names, switch):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)


def run(line: str) -> None:
    """Do what a line says. CalledProcessError."""
    subprocess.run(line.split(), check=True)


def main() -> int:
    """Begin a run on one machine, have the others join it, and wait for its end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("small-machines"), help="a new folder")
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    given.out.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: nothing stays
    peers = list[subprocess.Popen[str]]()

    def decentral(machine: str, line: str) -> subprocess.Popen[str]:
        print(f"$ decentral {line}", flush=True)
        command = [*machine.split(), sys.executable, "-m", "decentral", *line.split()]
        return subprocess.Popen(command, cwd=given.out, stdout=subprocess.PIPE, text=True)

    with machines(4) as ((large, address), *small):
        try:
            peers.append(decentral("", f"init run.toml --stages 3 --model-size 1M --rounds {given.rounds}"))
            peers[0].communicate()
            peers.append(decentral(large, f"start run.toml --listen /ip4/{address}/tcp/0 --no-lan --out large"))
            invite = peers[-1].stdout.readline().split()[-1]
            for number, (machine, address) in enumerate(small):
                place = f"--listen /ip4/{address}/tcp/0 --no-lan --out small{number}"
                peers.append(decentral(machine, f"join {invite} {SMALL} {place}"))
            return max(abs(peer.wait()) for peer in peers)
        finally:
            for peer in peers:
                peer.kill()
                peer.wait()


if __name__ == "__main__":
    sys.exit(main())
