"""What a member can say that is not so: made with its own key, sent over its own connections.

A liar runs the real code beside its lies, so that what is measured is the lie, and not a peer that is silent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import ModuleType

import anyio
import torch

from decentral.consensus.chain import Head
from decentral.errors import TransportError
from decentral.rounds.frame_io import CONTROL
from decentral.transport.requests import notify
from decentral.wire import messages as m
from decentral.wire.frames import Frame, FrameKind, Header, claims_of, seal
from decentral.wire.keys import Signer
from tests.kit.nodes import Lab, Member, tiny_model

STEP = 4.0  # s of virtual time for the inner steps of a round
CLEAN_ENOUGH = 0.8  # of the rounds that the same swarm makes without a liar


@contextmanager
def acting_as(peer: bytes, role: ModuleType, **acts: Callable[..., object]) -> Iterator[None]:
    """Replace functions of the round's state in ``role`` for one peer; all others act as written."""
    true = {name: getattr(role, name) for name in acts}

    def choose(name: str) -> Callable[..., object]:
        return lambda state, *args, **more: (acts if state.me == peer else true)[name](state, *args, **more)

    for name in acts:
        setattr(role, name, choose(name))
    try:
        yield
    finally:
        for name, function in true.items():
            setattr(role, name, function)


def record_after(head: Head, **changes: object) -> m.Record:
    """A record that follows ``head`` and changes nothing else than it is told to."""
    assert head.anchor is not None
    plain = m.Record(
        run=head.run,
        epoch=head.epoch,
        round=head.round + 1,
        outer_step=head.outer_step,
        fragment=0,
        plan=0,
        previous=head.hash,
        base=head.anchor,
        members=head.members,
        frames=(),
        contributors=(),
        partition=(),
        next_members=head.members,
        final=False,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def commit_of(record: m.Record, signers: Sequence[Signer], ballot: int = 0) -> m.Commit:
    """A commit with the votes of these."""
    text = m.vote_text(record.run, record.epoch, record.round, ballot, record.hash)
    votes = tuple(sorted((signer.peer, signer.sign(text)) for signer in signers))
    return m.Commit(record, m.Certificate(ballot, votes))


def contribution_frame(liar: Member, head: Head, value: float) -> Frame:
    """A contribution to the round after ``head`` whose every value is ``value``."""
    assert head.anchor is not None
    replica = liar.node.replica
    full_N = torch.full((replica.numel(0),), value)
    body = bytes(replica.codec.encode(full_N, replica.feedback[0], replica.shapes(0)).body) + liar.tail(0)
    header = Header(
        FrameKind.CONTRIBUTION, head.run, head.epoch, head.round + 1, 0, 0, 1, 0, head.anchor, liar.signer.peer, 30, 100
    )
    return seal(replace(header, claims=claims_of(head.outer_step, b"")), body, liar.signer)


async def say(liar: Member, to: Member, message: m.Message) -> None:
    """Over its own connection."""
    with suppress(TransportError):
        await notify(liar.transport, to.signer.peer, CONTROL, m.encode(message), timeout=10.0)


async def say_to_all(lab: Lab, liar: Member, message: m.Message) -> None:
    """To every other member of the lab."""
    for member in lab.members:
        if member is not liar:
            await say(liar, member, message)


def honest(lab: Lab, liar: Member) -> list[Member]:
    """All others."""
    return [member for member in lab.members if member is not liar]


Lie = Callable[[Lab, Member], Awaitable[None]]


async def at_a_head(member: Member) -> Head:
    """Where a member stands, once its newest record is applied."""
    while member.node.driver.head.anchor is None:
        await anyio.sleep(0.01)
    return member.node.driver.head


async def swarm_of(lab: Lab, n: int, rounds: int = 2) -> list[Member]:
    """Members that have made some rounds together."""
    for _ in range(n):
        lab.add()
    await lab.all_members()
    await lab.rounds(rounds)
    return lab.members


_CLEAN: dict[tuple[object, ...], int] = {}  # by preset, size, seconds and model: the same run each time


def rounds_in(
    run_lab, manifest, n: int, seconds: float, lie: Lie | None, check=lambda lab, liar: None, make_model=tiny_model
) -> int:
    """Rounds that a swarm of ``n`` makes in so many seconds of virtual time, while its last member lies."""
    key = (manifest.outer.method, n, seconds, make_model)
    if lie is None and key in _CLEAN:
        return _CLEAN[key]
    made: list[int] = []

    async def script(lab: Lab) -> None:
        liar = (await swarm_of(lab, n, rounds=3))[-1]
        before = min(member.rounds for member in honest(lab, liar))
        with anyio.move_on_after(seconds):
            if lie is not None:
                await lie(lab, liar)
            await anyio.sleep_forever()
        made.append(min(member.rounds for member in honest(lab, liar)) - before)
        check(lab, liar)
        lab.check_equal()

    run_lab(manifest, script, make_model=make_model, step=STEP)
    if lie is None:
        _CLEAN[key] = made[0]
    return made[0]


def check_it_costs_little(run_lab, manifest, n: int, seconds: float, lie: Lie, check, make_model=tiny_model) -> None:
    """The swarm makes nearly as many rounds beside the liar as without one, and is sound after it."""
    clean = rounds_in(run_lab, manifest, n, seconds, None, make_model=make_model)
    made = rounds_in(run_lab, manifest, n, seconds, lie, check, make_model)
    assert made >= CLEAN_ENOUGH * clean, f"{made} rounds, {clean} without a liar"


def one_after_the_other(run_lab, manifest, n: int, lies: Sequence[Lie], seconds: float, check) -> None:
    """A large swarm in which one member tells all the ``lies``, each for so long: after each it is as it was."""

    async def script(lab: Lab) -> None:
        liar = (await swarm_of(lab, n))[-1]
        for lie in lies:
            before = min(member.rounds for member in honest(lab, liar))
            with anyio.move_on_after(seconds):
                await lie(lab, liar)
            check(lab, liar)
            await lab.until(partial(all_are_at, honest(lab, liar), before + 2), limit=seconds)
        lab.check_equal()

    run_lab(manifest, script, make_model=tiny_model, step=STEP)


def all_are_at(members: Sequence[Member], outer_step: int) -> bool:
    """Whether all have made so many outer steps."""
    return all(member.rounds >= outer_step for member in members)


def check_nobody_is_out(lab: Lab, liar: Member) -> None:
    """All honest members are members, in the eyes of each, and the run goes on."""
    wanted = {member.signer.peer for member in honest(lab, liar)}
    for member in honest(lab, liar):
        head = member.node.driver.head
        assert wanted <= set(head.members), "an honest peer was put out"
        assert not head.final, "the run was ended"
        assert "shrunk" not in [event for event, _ in member.events], "a majority was given up that is here"
