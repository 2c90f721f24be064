"""Seconds that a frame takes over a connection that was idle before, by how TCP sends: what a round begins with.

    python -m experiments.exchange.idle --mbit 100 --delay 0.04 --nbytes 585000

As root on Linux; see docs/natlab.md. The delay is one way, from a peer to the core: four of them are a round trip. The
two ends are plain sockets, as a transport's own frames and keys add nothing to what TCP lets go at once.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time

from tests.natlab.lab import Lab
from tests.natlab.namespaces import why_impossible
from tests.natlab.wires import Line

PORT, PIECE = 9000, 1 << 18
IDLE = (0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 30.0, 0.0)  # s before each frame after the first


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="each way")
    parser.add_argument("--delay", type=float, default=0.04, help="seconds one way")
    parser.add_argument("--nbytes", type=int, default=585_000, help="of a frame")
    parser.add_argument("--end", nargs=2, metavar=("ROLE", "HOST"), help=argparse.SUPPRESS)
    parser.add_argument("--congestion", default="cubic", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """See above."""
    given = options()
    if given.end is not None:
        (receive if given.end[0] == "receive" else send)(given.end[1], given)
        return 0
    if why := why_impossible():
        print(f"error: {why}", file=sys.stderr)
        return 1
    line = Line(up=given.mbit, down=given.mbit, delay=given.delay)
    with Lab() as lab:
        senders = []
        for number, (congestion, slow) in enumerate((one, slow) for one in ("cubic", "bbr") for slow in (1, 0)):
            a, b = (lab.public(f"{side}{number}", line) for side in "ab")
            a.run("sysctl", "-qw", f"net.ipv4.tcp_slow_start_after_idle={slow}")
            command = (sys.executable, "-m", "experiments.exchange.idle", "--nbytes", str(given.nbytes))
            receiver = b.start(*command, "--end", "receive", str(b.v4), stdout=subprocess.PIPE)
            assert receiver.stdout is not None
            receiver.stdout.readline()
            end = ("--end", "send", str(b.v4), "--congestion", congestion)
            senders.append((congestion, slow, a.start(*command, *end, stdout=subprocess.PIPE)))
        for congestion, slow, sender in senders:
            print(
                f"{congestion}, tcp_slow_start_after_idle={slow}: first {sender.communicate()[0].strip()}", flush=True
            )
    return 0


def receive(host: str, given: argparse.Namespace) -> None:
    """Take frames and answer each with a byte, until the connection ends."""
    with socket.create_server((host, PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        with connection:
            while take(connection, given.nbytes):
                connection.sendall(b"!")


def send(host: str, given: argparse.Namespace) -> None:
    """Send frames after having been idle, and print the seconds until each was there and answered."""
    with socket.socket() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, given.congestion.encode())
        connection.connect((host, PORT))
        found = []
        for idle in (0.0, *IDLE):
            time.sleep(idle)  # noqa: TID251  the kernel's clock is what is measured
            began = time.monotonic()
            connection.sendall(bytes(given.nbytes))
            take(connection, 1)
            found.append(f"{time.monotonic() - began:.2f}" + (f" (after {idle:g} s)" if idle else ""))
        print(", ".join(found), flush=True)


def take(connection: socket.socket, nbytes: int) -> bool:
    """Take so many bytes; tell whether they all came."""
    while nbytes:
        piece = connection.recv(min(nbytes, PIECE))
        if not piece:
            return False
        nbytes -= len(piece)
    return True


if __name__ == "__main__":
    sys.exit(main())
