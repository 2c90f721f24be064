"""Words in the place of an invite: read from the command line, and exchanged for the invite."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import click

PATIENCE = 60.0  # s to find who invites, where nothing else was asked for


def as_one_text(invite: str, arguments: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Words that were typed without quotes are one invite; what follows them stays a script's arguments."""
    from decentral.swarm.words import WORDS

    apart = (invite, *arguments[:WORDS])
    spoken = len(apart) == WORDS + 1 and all(one.isalpha() for one in apart[:-1]) and apart[-1][:1].isdecimal()
    return (" ".join(apart), tuple(arguments[WORDS:])) if spoken else (invite, tuple(arguments))


def invite_of(
    said: Sequence[str], relays: Sequence[str], *, lan: bool = True, seconds: float | None = None
) -> tuple[str, tuple[str, ...]]:
    """An invite line as it is, or the one that words are exchanged for; and the relays' whole addresses.

    Raises InviteError, NoPeersError.
    """
    from decentral.swarm.words import looks_spoken

    text = " ".join(said)
    return _exchanged(text, relays, lan=lan, seconds=seconds) if looks_spoken(text) else (text, tuple(relays))


def _exchanged(words: str, relays: Sequence[str], *, lan: bool, seconds: float | None) -> tuple[str, tuple[str, ...]]:
    import anyio

    from decentral.swarm.meeting import find_invite
    from decentral.swarm.words import parse_code

    code = parse_code(words)
    known = relays_at(relays)
    click.echo(f"looking for who invites at {code.number} ...", err=True)
    look = partial(find_invite, code, known, lan=lan, seconds=PATIENCE if seconds is None else seconds)
    return str(anyio.run(look, backend="asyncio")), known


def relays_at(given: Sequence[str]) -> tuple[str, ...]:
    """Their multiaddrs; HOST and HOST:PORT are asked who they are. Raises TransportError."""
    import anyio

    from decentral.swarm.meeting import relay_at

    return tuple(where if where.startswith("/") else anyio.run(relay_at, where) for where in given)


def relays_of(invite: str) -> tuple[str, ...]:
    """Those that the invite's addresses lead through."""
    from decentral.swarm.invite import Invite
    from decentral.transport.relay.circuit import relay_of

    found = (relay_of(address) for address in Invite.parse(invite).addresses)
    return tuple(dict.fromkeys(relay[1] for relay in found if relay is not None))
