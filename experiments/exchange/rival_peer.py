"""One peer of gloo's or of hivemind's side of the comparison: as ``decentral.benchmarks.exchange_peer``, but theirs.

    python -m experiments.exchange.rival_peer '{"system": "gloo", "number": 0, ...}'

Both average one tensor (gloo also gathers all of them). What each peer ends with is held against the mean, known to
all: equal replicas are here those within float32's rounding of it, because hivemind's always differ in their last bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist  # noqa: TID251  what ours is compared with
from torch import Tensor

from decentral.benchmarks.exchange_peer import processor_seconds

LIMIT = 300.0  # s after which a step has failed
ROUNDING = 1e-5  # of a mean of standard normal values in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalSeat:
    """What a peer is told on its command line."""

    system: str  # gloo, hivemind
    kind: str  # gather, reduce
    number: int
    peers: int
    rows: int  # of 1,024 values
    address: str  # IPv4, of its interface wan
    first: str  # IPv4 of peer 0
    bootstrap: Sequence[str] = ()  # hivemind


class System(Protocol):
    """What is compared."""

    def addresses(self) -> Sequence[str]: ...

    def join(self) -> None: ...

    def average(self, own_N: Tensor) -> Tensor: ...


class Gloo:
    """torch.distributed over TCP. A ring; a peer that goes ends it for all."""

    def __init__(self, seat: RivalSeat) -> None:
        self.seat = seat

    def addresses(self) -> Sequence[str]:
        """Nothing to know but peer 0's."""
        return ()

    def join(self) -> None:
        """Meet the others; returns when all are there."""
        os.environ["GLOO_SOCKET_IFNAME"] = "wan"
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{self.seat.first}:29500",
            rank=self.seat.number,
            world_size=self.seat.peers,
            timeout=timedelta(seconds=LIMIT),
        )

    def average(self, own_N: Tensor) -> Tensor:
        """An all-reduce, or an all-gather of everybody's whole tensor and the mean of that."""
        if self.seat.kind == "reduce":
            dist.all_reduce(own_N)
            return own_N / self.seat.peers
        every = [torch.empty_like(own_N) for _ in range(self.seat.peers)]
        dist.all_gather(every, own_N)
        return torch.stack(every).mean(0)


class Hivemind:
    """Its averager with its defaults, told only how many peers there are."""

    def __init__(self, seat: RivalSeat) -> None:
        from hivemind import DHT, DecentralizedAverager

        self.seat = seat
        listen = [f"/ip4/{seat.address}/tcp/0"]
        self.dht = DHT(host_maddrs=listen, initial_peers=list(seat.bootstrap), start=True)
        self.averager = DecentralizedAverager(
            [torch.zeros(seat.rows * 1024)],
            self.dht,
            start=True,
            prefix="comparison",
            target_group_size=seat.peers,
            min_group_size=seat.peers,
        )

    def addresses(self) -> Sequence[str]:
        """Those that lead to its DHT."""
        return [str(address) for address in self.dht.get_visible_maddrs()]

    def join(self) -> None:
        """It has."""

    def average(self, own_N: Tensor) -> Tensor:
        """One step: find a group, all-reduce."""
        with self.averager.get_tensors() as (tensor_N,):
            tensor_N.copy_(own_N)
        self.averager.step(timeout=LIMIT)
        with self.averager.get_tensors() as (tensor_N,):
            return tensor_N.clone()


SYSTEMS: dict[str, Callable[[RivalSeat], System]] = {"gloo": Gloo, "hivemind": Hivemind}


class Rival:
    """The peer at one seat."""

    def __init__(self, seat: RivalSeat) -> None:
        self.seat, self.system = seat, SYSTEMS[seat.system](seat)
        everybody = [self._values(number) for number in range(seat.peers)]
        self._own_N, self._mean_N = everybody[seat.number], torch.stack(everybody).mean(0)
        self._trained_N = self._own_N

    def _values(self, number: int) -> Tensor:
        return torch.randn(self.seat.rows * 1024, generator=torch.Generator().manual_seed(number))

    def run(self) -> None:
        """Obey until stdin ends."""
        _say(addresses=self.system.addresses())
        self.system.join()
        for line in sys.stdin:
            _say(**self._obey(str(json.loads(line)["do"])))

    def _obey(self, order: str) -> dict[str, Any]:  # Any: JSON
        if order == "members":
            return {"members": self.seat.peers}
        if order == "train":
            self._trained_N = self._own_N.clone()  # gloo averages in place
            return {}
        return self._round()

    def _round(self) -> dict[str, Any]:  # Any: JSON
        own_N, sent, worked, began = self._trained_N, _sent(), processor_seconds(), time.monotonic()
        try:
            mean_N = self.system.average(own_N)
        except Exception as error:  # noqa: BLE001  whatever they raise, the round has failed
            print(f"{self.seat.system}, peer {self.seat.number}: {error!r}", file=sys.stderr)
            mean_N = self._own_N
        seconds = time.monotonic() - began
        right = bool((mean_N - self._mean_N).abs().max() < ROUNDING)
        return {
            "seconds": seconds,
            "held": seconds,
            "processor": processor_seconds() - worked,
            "nbytes": 4 * len(own_N),
            "sent": _sent() - sent,
            "digest": "the mean" if right else hashlib.blake2b(mean_N.numpy().tobytes()).hexdigest(),
            "contributors": self.seat.peers if right else 0,
            "ballot": 0,
        }


def _sent() -> int:
    """Bytes that left by this namespace's line, headers included; /sys would show the machine's own lines."""
    wan = next(line for line in Path("/proc/thread-self/net/dev").read_text().splitlines() if "wan:" in line)
    return int(wan.split(":")[1].split()[8])


def _say(**answer: Any) -> None:  # Any: JSON
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    Rival(RivalSeat(**json.loads(sys.argv[1]))).run()
