"""A private peer's daemon and its place at a relay: waited for at the start, and regained by starting the daemon again.

go-libp2p 0.32 does not come back to a relay that was gone: none took its place again within 240 s of the relay's
restart, dialled or not (docs/relay.md). A daemon that starts takes one at once.

Nor does it name a place at a relay on loopback or a private network, a VPN say, although it keeps one: that is found
out by dialling this peer through the relay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import anyio

from decentral.errors import PayloadError, TransportError
from decentral.transport.daemon.control import Control
from decentral.transport.relay_questions import unnamed_places
from decentral.wire.keys import PeerId, peer_from_name

FIRST_PATIENCE, LONGEST_PATIENCE = 20.0, 640.0  # s without a place before the daemon is started again
LOOK_EVERY = 5.0  # s
FIRST_PLACE = 5.0  # s for a place before the start goes on without; a relay grants one within milliseconds
NAMED = 1.0  # s of those for the daemon to name it
_POLL = 0.02  # s between questions while it is waited for


class Placeless:
    """How long there was no place. Times in seconds, of any clock that does not stand still."""

    def __init__(self, now: float) -> None:
        self._since, self._patience = now, FIRST_PATIENCE

    def look(self, addresses: Sequence[str], now: float) -> bool:
        """Whether it has lasted too long; ``addresses`` are the daemon's."""
        if has_place(addresses):
            self._since, self._patience = now, FIRST_PATIENCE
        return now - self._since >= self._patience

    def started_again(self, now: float) -> None:
        """The daemon was; give it time, and more of it than before."""
        self._since, self._patience = now, min(2 * self._patience, LONGEST_PATIENCE)


def has_place(addresses: Sequence[str]) -> bool:
    """Whether one of them leads through a relay."""
    return any("/p2p-circuit" in address for address in addresses)


async def until_placed(
    control: Control, me: PeerId, relays: Sequence[str], named: Sequence[str]
) -> tuple[Sequence[str], Sequence[str]]:
    """What the daemon names and what it does not, once one of them leads through a relay, or after a while.

    An invite that is made before leads nowhere.
    """
    unnamed: Sequence[str] = ()
    with anyio.move_on_after(FIRST_PLACE):
        await _one_answers(control, relays)
        with anyio.move_on_after(NAMED):
            while not has_place(named):
                await anyio.sleep(_POLL)
                named = (await control.identify())[1]
        while not has_place((*named, *unnamed)):
            unnamed = await unnamed_places(me, relays)
            await anyio.sleep(_POLL)
    return named, unnamed


async def until_worth_a_restart(
    placeless: Placeless,
    control: Control,
    me: PeerId,
    relays: Sequence[str],
    named: Callable[[], Sequence[str]],
    on_unnamed: Callable[[Sequence[str]], None],
) -> None:
    """Return when there was no place for long, and a relay answers that would have one.

    ``on_unnamed`` is told of the places that the daemon has without a word of them.
    """
    while True:
        await anyio.sleep(LOOK_EVERY)
        if not placeless.look(named(), anyio.current_time()):
            continue
        unnamed = await unnamed_places(me, relays)
        on_unnamed(unnamed)
        if not placeless.look(unnamed, anyio.current_time()):
            continue
        if await _one_answers(control, relays):
            placeless.started_again(anyio.current_time())
            return


async def _one_answers(control: Control, relays: Sequence[str]) -> bool:
    for address in relays:
        with suppress(TransportError, PayloadError):
            await control.connect(peer_from_name(address.rpartition("/p2p/")[2]), [address])
            return True
    return False
