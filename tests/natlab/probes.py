"""Small questions to a network, asked with plain sockets: who do I look like, does this arrive, how fast, how late."""

from __future__ import annotations

import socket
import threading
import time

from tests.natlab.lab import Host

Address = tuple[str, int]


class Ear:
    """A UDP socket of a host that says who sent what."""

    def __init__(self, host: Host, port: int, family: int = socket.AF_INET) -> None:
        self.socket = host.socket(family)
        self.socket.bind(("" if family == socket.AF_INET else "::", port))
        self.address: Address = ((host.v4 if family == socket.AF_INET else host.v6) or "", port)

    def __enter__(self) -> Ear:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, words: bytes, to: Address) -> None:
        self.socket.sendto(words, to)

    def hear(self) -> tuple[bytes, Address]:
        words, sender = self.socket.recvfrom(2048)
        return words, (sender[0], sender[1])

    def seen_by(self, other: Ear) -> Address:
        """What this socket's address looks like from there."""
        self.say(b"who am I?", other.address)
        words, sender = other.hear()
        assert words == b"who am I?"
        return sender


def tcp_seen_by(host: Host, port: int, listener: socket.socket, to: Address) -> Address:
    """What a TCP connection from ``port`` of ``host`` looks like where it is accepted."""
    with host.socket(kind=socket.SOCK_STREAM) as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        caller.bind(("", port))
        caller.connect(to)
        accepted, sender = listener.accept()
        accepted.close()
        return sender[0], sender[1]


def listening(host: Host, port: int, family: int = socket.AF_INET) -> socket.socket:
    made = host.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # opens again while its last caller lingers
    made.bind(("" if family == socket.AF_INET else "::", port))
    made.listen(8)
    return made


def megabits(sender: Host, receiver: Host, to: Address, seconds: float) -> float:
    """Mbit/s of one TCP stream over the last three quarters of that time, with the headers of full packets."""
    with listening(receiver, to[1]) as door, sender.socket(kind=socket.SOCK_STREAM) as caller:
        caller.connect(to)
        accepted, _ = door.accept()
        with accepted:
            accepted.settimeout(5.0)
            pump = threading.Thread(target=_pump, args=(caller, seconds))
            pump.start()
            first = last = time.monotonic()
            warm, nbytes = first + seconds / 4, 0
            while data := accepted.recv(1 << 16):
                last = time.monotonic()
                if last < warm:
                    first = last
                else:
                    nbytes += len(data)
            pump.join()
    return 8e-6 * nbytes * 1514 / 1448 / (last - first)


def _pump(caller: socket.socket, seconds: float) -> None:
    end, block = time.monotonic() + seconds, bytes(1 << 14)
    while time.monotonic() < end:
        caller.sendall(block)
    caller.shutdown(socket.SHUT_WR)


def one_way(sender: Ear, receiver: Ear, tries: int = 15) -> float:
    """Least seconds that a packet takes: all hosts share one clock."""
    took = []
    for number in range(tries):
        began = time.monotonic()
        sender.say(b"%d" % number, receiver.address)
        assert receiver.hear()[0] == b"%d" % number
        took.append(time.monotonic() - began)
    return min(took)
