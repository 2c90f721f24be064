"""Records of a chain of three peers, made by hand."""

from __future__ import annotations

from dataclasses import replace

from decentral.consensus.chain import (
    Head,
)
from decentral.wire import messages as m
from tests.kit.machines import RUN, digest_of, ref, signer_of

A, B, C = sorted(signer_of(n).peer for n in range(3))


START = Head(RUN, 0, 0, 0, digest_of("genesis"), digest_of("anchor"), (A, B, C))


def record(head: Head, tokens: dict[bytes, int], next_members: tuple[bytes, ...] = (A, B, C)) -> m.Record:
    frames = tuple(replace(ref(peer, digest_of(peer, head.hash)), tokens=n) for peer, n in sorted(tokens.items()))
    lists = {"members": head.members, "frames": frames, "contributors": (), "partition": ()}
    base = head.anchor or digest_of("anchor", head.hash)
    numbers = {"epoch": head.epoch, "round": head.round + 1, "outer_step": head.outer_step, "fragment": 0, "plan": 0}
    given = {"run": RUN, "previous": head.hash, "base": base, "next_members": next_members, "final": False}
    return m.Record(**numbers, **lists, **given)
