"""The problem that real peers learn: its terms, the peers that learn it alone, and swarms of them on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from decentral.manifest import Manifest, preset_manifest
from decentral.observe.status import Status
from decentral.peer import Peer, join
from decentral.swarm.identity import Identity
from decentral.transport.memory import MemoryNetwork
from tests.kit.patience import PATIENCE, until

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
NET: dict[str, Any] = {"listen": LOOPBACK, "transport": "native", "lan": False}


def run_terms(preset: str, **tables: dict[str, Any]) -> Manifest:
    limits = {"deadline_floor": 1.0, "deadline_ceiling": 20.0, "lease": 10.0, "shrink_after": 12.0, "min_peers": 1}
    swarm = {**limits, **tables.pop("swarm", {})}
    run = {"rounds": 6, "salt": "test", "seed": 0, **tables.pop("run", {})}
    inner = {"steps": 6, **tables.pop("inner", {})}
    return preset_manifest(preset, run=run, swarm=swarm, inner=inner, **tables)


class Sum(nn.Module):
    """Two blocks and a head, so that it has three fragments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(2)])
        self.head = nn.Linear(64, 64, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return sum(layer(inputs) for layer in self.layers) + self.head(inputs)


class Problem:
    """Least squares: the model, its optimizer, and one step of a peer's own data."""

    def __init__(self, seed: int, lr: float = 0.02) -> None:
        generator = torch.Generator().manual_seed(7)
        self.model = Sum()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(64, 64, generator=generator) * 0.1)
        self.goal = torch.randn(64, 64, generator=generator)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.data = torch.Generator().manual_seed(seed)

    def flat(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])

    def batch(self) -> torch.Tensor:
        return torch.randn(32, 64, generator=self.data)

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        """In the model's dtype, on its device."""
        wanted, like = inputs @ self.goal.T, next(self.model.parameters())
        return (self.model(inputs.to(like)) - wanted.to(like)).square().mean()

    def step(self) -> float:
        loss = self.loss(self.batch())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def adam(seed: int, lr: float = 0.01) -> Problem:
    problem = Problem(seed)
    problem.optimizer = torch.optim.AdamW(problem.model.parameters(), lr=lr)
    return problem


def poison(problem: Problem) -> None:
    with torch.no_grad():
        problem.model.head.weight[0, 0] = float("nan")


# ---- one peer ----


def joined(run: Manifest | str, problem: Any, out: Path, **given: Any) -> Peer:
    """A peer on loopback, over the native transport; alone, unless somebody comes."""
    return join(run, problem.model, problem.optimizer, out=out, **{**NET, "quiet": True, "alone": True, **given})


def alone(out: Path, manifest: Manifest, problem: Any, **given: Any) -> Peer:
    """A peer that nobody joins, over a network in memory."""
    identity = Identity.load_or_create(out / "identity.key")
    transport = MemoryNetwork().transport(identity.signer)
    settings = {"transport": transport, "quiet": True, "alone": True, **given}
    return join(manifest, problem.model, problem.optimizer, out=out, **settings)


def train(peer: Peer, problem: Any, rounds: int | None = None) -> None:
    """Until the run is over, or ``rounds`` are made."""
    until(lambda: peer.done or (rounds is not None and peer.round >= rounds), problem.step)


def told(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


def contributed(events: list[dict[str, Any]]) -> int:
    return sum(bool(event.get("contributed") or event.get("partner")) for event in list(events))


# ---- several ----


class Swarm:
    """A founder and those that it invites, each on a thread of its own with its own problem.

    They wait until all are members and train until the run is done; ``given`` goes to ``join`` of all of them.
    """

    logs = False  # tell each loss to the peer

    def __init__(self, manifest: Manifest, folder: Path, *problems: Any, **given: Any) -> None:
        self.manifest, self.folder, self.problems, self.given = manifest, folder, list(problems), given
        self.invite, self.invited = "", threading.Event()
        self.digests: dict[int, str] = {}
        self.anchors: dict[int, list[torch.Tensor]] = {}
        self.losses: dict[int, list[float]] = {}
        self.events: dict[int, list[dict[str, Any]]] = {}
        self.last: dict[int, Status] = {}

    def run(self, timeout: float = PATIENCE) -> Self:
        run_together(*(lambda n=n: self.peer(n) for n in range(len(self.problems))), timeout=timeout)
        return self

    def ends_alike(self) -> Self:
        """Run it; all end with the same bits."""
        self.run()
        assert len(self.digests) == len(self.problems)
        assert len(set(self.digests.values())) == 1
        return self

    def peer(self, number: int, **given: Any) -> None:
        with self.enters(number, **given) as peer:
            self.meets(peer)
            self.trains(number, peer)
            self.digests[number], self.anchors[number], self.last[number] = (
                peer.anchor_digest,
                peer.anchor(),
                peer.status(),
            )

    @contextmanager
    def enters(self, number: int, **given: Any) -> Iterator[Peer]:
        """In the swarm while the block lasts; the founder's invite is known to the others."""
        assert not number or (self.invited.wait(PATIENCE) and self.invite)
        events, run = self.events.setdefault(number, []), self.invite if number else self.manifest
        settings = {"observer": events.append, **self.given, **given}
        try:
            with joined(run, self.problems[number], self.folder / f"peer{number}", **settings) as peer:
                if not number:
                    self.invite = peer.invite
                    self.invited.set()
                yield peer
        finally:
            self.invited.set()  # nobody waits for a founder that failed

    def meets(self, peer: Peer) -> None:
        until(lambda: len(peer.status().members) == len(self.problems))

    def trains(self, number: int, peer: Peer) -> None:
        losses = self.losses.setdefault(number, [])
        while not peer.done:
            losses.append(self.problems[number].step())
            if self.logs:
                peer.log(loss=losses[-1])


def run_together(*bodies: Callable[[], None], timeout: float = PATIENCE) -> None:
    """Run each body on a thread of its own; the first failure is raised."""
    failures: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's thread
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a peer hangs"
