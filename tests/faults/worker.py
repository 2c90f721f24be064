"""One real peer in a process of its own: real daemon, real disk, a trainer that pulls towards its own target.

Lines in, JSON: ``{"die": PHASE, "token": FILE}``: SIGKILL itself the next time it reaches that phase of a round, if it
is the first of all who were told to. Lines out, JSON: ``ready`` with the invite, one ``round`` per commit with the
anchor's digest.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import torch

from decentral.manifest import load_manifest
from decentral.node.durable_store import DurableStore
from decentral.node.node import Node, Start
from decentral.parameters import Schema, schema_of
from decentral.replica.contribution import Contribution
from decentral.rounds.driver import Driver
from decentral.rounds.local_state import CommittedUpdate
from decentral.swarm.identity import Identity
from decentral.swarm.invite import Invite
from decentral.transport.daemon.transport import DaemonTransport
from decentral.wire.messages import Commit, Proposal, ReducePlan, Vote

PAUSE = 0.25  # s between a commit and the next offer


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class Reaper:
    """Kills this process at a phase; every phase is a place in the real driver."""

    def __init__(self) -> None:
        self.phase: str | None = None
        self.token = Path()

    def reach(self, phase: str) -> None:
        if phase == self.phase and self._is_first():
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_first(self) -> bool:
        try:
            self.token.touch(exist_ok=False)
        except FileExistsError:
            self.phase = None
            return False
        return True

    def watch(self, driver: Driver) -> None:
        for role, name, before, after in (
            (driver, "_offer", "before offer", "after offer"),
            (driver.frames.pushes, "push", "before push", "after push"),
            (driver, "_decide", "before decide", "after decide"),
        ):
            setattr(role, name, self._around(getattr(role, name), before, after))
        driver.frames.send = self._around_send(driver.frames.send)  # type: ignore[method-assign]
        ledger = driver.state.ledger
        ledger.append = self._around_plain(ledger.append, "before log", "after log")
        ledger.save_acceptor = self._around_plain(ledger.save_acceptor, "before vote", "after vote logged")

    def _around(self, work: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
        async def watched(*args: Any) -> Any:
            self.reach(before)
            result = await work(*args)
            self.reach(after)
            return result

        return watched

    def _around_plain(self, work: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            self.reach(before)
            result = work(*args)
            self.reach(after)
            return result

        return watched

    def _around_send(self, work: Callable[..., Any]) -> Callable[..., Any]:
        names = {Proposal: "proposal", Vote: "vote", Commit: "commit", ReducePlan: "plan"}

        async def watched(to: bytes, message: Any) -> Any:
            name = names.get(type(message), "other")
            self.reach(f"before {name} is sent")
            result = await work(to, message)
            self.reach(f"after {name} is sent")
            return result

        return watched


def small_schema(fragments: int) -> Schema:
    model = torch.nn.Module()
    model.emb = torch.nn.Parameter(torch.zeros(70, 64))
    model.layers = torch.nn.ModuleList([torch.nn.Linear(64, 67) for _ in range(4)])
    return schema_of(model, fragments)


async def train(node: Node, seed: int) -> None:
    schema, driver = node.start.schema, node.driver
    while True:
        await anyio.sleep(PAUSE)
        head = driver.head
        if head.anchor is None or head.final or driver.state.pending is not None or not driver.state.is_member:
            continue
        fragment = head.fragment(len(schema.fragments))
        anchor = node.replica.anchors[fragment]
        generator = torch.Generator().manual_seed(seed)
        target = torch.randn(schema.fragments[fragment].numel, generator=generator)
        local = anchor + 0.3 * (target - anchor)
        await driver.contribute(Contribution(fragment, head.hash, local, anchor - local, 1, 1))


async def listen_for_orders(reaper: Reaper, scope: anyio.CancelScope) -> None:
    while True:
        line = await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
        if not line:
            scope.cancel()
            return
        order = json.loads(line)
        reaper.token, reaper.phase = Path(order["token"]), order["die"]


async def main(options: argparse.Namespace) -> None:
    manifest = load_manifest(options.manifest)
    schema = small_schema(manifest.outer.fragments)
    options.out.mkdir(parents=True, exist_ok=True)
    identity = Identity.load_or_create(options.out / "identity.key")
    store = DurableStore(options.out)
    transport = DaemonTransport(identity, listen=("/ip4/127.0.0.1/tcp/0",))
    invite = Invite.parse(options.join) if options.join else None

    def on_update(update: CommittedUpdate) -> None:
        if update.record is not None:
            record = update.record
            refs = record.contributors or record.frames
            say(
                event="round",
                round=record.round,
                outer_step=record.outer_step,
                digest=node.replica.digest.hex(),
                named=[ref.peer.hex()[:8] for ref in refs],
                members=len(record.next_members),
            )

    start = Start(
        manifest=manifest,
        schema=schema,
        anchors=[torch.zeros(f.numel) for f in schema.fragments],
        founder=invite is None,
        bootstrap=invite.addresses if invite else (),
    )
    node = Node(
        start,
        signer=identity.signer,
        transport=transport,
        ledger=store.ledger(),
        on_update=on_update,
        on_event=lambda event, fields: None,
    )
    reaper = Reaper()
    reaper.watch(node.driver)
    async with transport, anyio.create_task_group() as group:
        await group.start(node.run)
        say(
            event="ready",
            invite=str(Invite(manifest.digest, transport.addresses()[:8], None)),
            me=identity.peer.hex()[:8],
        )
        group.start_soon(train, node, options.seed)
        await listen_for_orders(reaper, group.cancel_scope)
    store.close()


def run(arguments: Sequence[str]) -> None:
    """``MANIFEST --out FOLDER --seed N [--join INVITE]``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--join", default=None)
    anyio.run(main, parser.parse_args(arguments))
