"""The line between one household and the internet: its rates, its delay, its losses, its death.

Without delay a line is a veth pair. With delay it is two TUN devices with ``delaywire.c`` between them, compiled when
first needed, because netem is not in every kernel. Rates are token buckets at both ends, each before the delay, with
the buffer of a home router behind them. Losses and cuts are rules of the core, which everything crosses. All of it can
be changed while the line is in use.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from tests.natlab.namespaces import LabError, Namespace

_SOURCE = Path(__file__).with_name("delaywire.c")
_BURST = 16384  # bytes that pass at once: ten packets; 20 Mbit/s measured within 3 %
_BUFFER = "100ms"  # of the line's rate: 250 KB at 20 Mbit/s, which is what home routers have


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What a provider sells: megabits per second each way, seconds one way, and the share of packets lost."""

    up: float | None = None  # Mbit/s towards the internet; None: as fast as the machine
    down: float | None = None
    delay: float = 0.0  # s, each way
    jitter: float = 0.0  # s that packets may take longer, each way and in order; of a line with a delay
    loss: float = 0.0  # share of packets, each way


class Wire:
    """One line that exists: interface ``wan`` of the household's outermost box, ``to<N>`` of the core."""

    def __init__(self, core: Namespace, home: Namespace, number: int, line: Line) -> None:
        self.core, self.home, self.number, self.line = core, home, number, line
        self.far = f"to{number}"
        self.process: subprocess.Popen[str] | None = None  # that delays it, if any
        if line.delay:
            self.process = _forwarded(core, self.far, home, "wan")
            self.delay(line.delay, line.jitter)
        else:
            core.ip(f"link add {self.far} type veth peer name wan netns {home.path}")
        core.ip(f"link set {self.far} up")
        home.ip("link set wan up")
        core.nft(f"add chain inet core line{number}; add rule inet core faults jump line{number}")
        self.shape(up=line.up, down=line.down)
        self.lose(line.loss)

    def shape(self, *, up: float | None, down: float | None) -> None:
        """Set the rates, in Mbit/s."""
        self.line = replace(self.line, up=up, down=down)
        for namespace, interface, rate in ((self.home, "wan", up), (self.core, self.far, down)):
            if rate is not None:
                bucket = f"tbf rate {rate * 1000:.0f}kbit burst {_BURST} latency {_BUFFER}"
                namespace.tc(f"qdisc replace dev {interface} root {bucket}")

    def delay(self, seconds: float, jitter: float = 0.0) -> None:
        """Delay packets that come from now on by so much, and by up to ``jitter`` more; LabError on a veth pair."""
        if self.process is None:
            raise LabError(f"{self.far}: a line that was made without a delay cannot be given one; make it with one")
        assert self.process.stdin is not None
        self.process.stdin.write(f"{round(seconds * 1e6)} {round(jitter * 1e6)}\n")
        self.process.stdin.flush()
        _expect("set", self.process)
        self.line = replace(self.line, delay=seconds, jitter=jitter)

    def become(self, line: Line) -> None:
        """Be another line, for whatever comes from now on."""
        self.shape(up=line.up, down=line.down)
        if (line.delay, line.jitter) != (self.line.delay, self.line.jitter):
            self.delay(line.delay, line.jitter)
        self.lose(line.loss)

    def lose(self, share: float) -> None:
        """Drop this share of the packets, each way; 1 is a cut line that nobody is told of."""
        self.line = replace(self.line, loss=share)
        chain = f"inet core line{self.number}"
        drop = "drop" if share >= 1 else f"numgen random mod 10000 < {round(share * 10000)} drop"
        rules = [f"add rule {chain} {way} {self.far} {drop}" for way in ("iifname", "oifname")] if share else []
        self.core.nft("\n".join([f"flush chain {chain}", *rules]))

    def cut(self) -> None:
        """Nothing passes any more, and no side is told."""
        self.lose(1.0)

    def mend(self, loss: float = 0.0) -> None:
        """It works again."""
        self.lose(loss)

    def end(self) -> None:
        """End the forwarder, if there is one; its devices go with it."""
        if self.process is not None:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.close()
            self.process.wait()
            self.process.stdout.close()


def _forwarded(core: Namespace, far: str, home: Namespace, near: str) -> subprocess.Popen[str]:
    program, ends = _forwarder(), (core.descriptor, home.descriptor)
    command = [f"/proc/self/fd/{program}", str(ends[0]), far, str(ends[1]), near]
    process = subprocess.Popen(
        command, pass_fds=(program, *ends), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    _expect("up", process)
    return process


def _expect(word: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if process.stdout.readline() != f"{word}\n":
        raise LabError(f"delaywire ended with {process.wait()}; see its message above")


@functools.cache
def _forwarder() -> int:
    """The compiled forwarder, as a descriptor of a file that no longer has a name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "delaywire"
        done = subprocess.run(
            ["gcc", "-O2", "-o", str(path), str(_SOURCE)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise LabError(f"{_SOURCE.name} does not compile here: {done.stderr.strip()[:500]}")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
