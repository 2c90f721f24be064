"""The giving side: a peer's own state, cut in pieces and sealed, one piece to each of a few members.

It yields to frames: a stripe is sent while no other bulk is under way, or after ``PATIENCE`` all the same, and then the
line rests for as long as the stripe took. What has pieces of the state before goes on having them until enough keepers
have the new one whole.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from decentral.errors import PayloadError, TransportError
from decentral.flow.waiting import Offload
from decentral.manifest import Redundancy
from decentral.redundancy.keeper import FULL, KEEP, STRIPE, TAKEN
from decentral.redundancy.pieces import SALT_NBYTES, Label, Seals
from decentral.transport import Transport
from decentral.transport.requests import request
from decentral.wire.keys import PeerId, peer_name

# ---- giving one state ----

TIMEOUT = 30.0  # s for a keeper to be reached, and to answer
PATIENCE = 5.0  # s for which a stripe lets other bulk pass
LOOK_EVERY = 0.1  # s

Others = Callable[[], Mapping[PeerId, Sequence[str]]]  # members that are here, and their addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """A peer's way to the others, and how it is used."""

    transport: Transport
    others: Others
    may_send: Callable[[], bool] = lambda: True  # None of the day's upload is left for this otherwise
    is_quiet: Callable[[], bool] = lambda: True  # no other bulk is under way


@dataclass(frozen=True, slots=True)
class GivenState:
    """The keepers that have the whole of a piece each, or why too few have."""

    round: int
    keepers: tuple[PeerId, ...]
    nbytes: int  # sent, without questions
    seconds: float
    why: str = ""  # empty: enough have


class Giver:
    """The giving side of a peer."""

    def __init__(self, terms: Redundancy, seals: Seals, way_out: WayOut, offload: Offload) -> None:
        self._terms, self._seals, self._way_out, self._offload = terms, seals, way_out, offload
        self.is_busy = False  # may be read on any thread

    async def give(self, state: bytes, round_: int) -> GivenState | None:
        """Give ``state``, as it was after ``round_``, to keepers; None while another one is being given."""
        if self.is_busy:
            return None
        self.is_busy = True
        try:
            return await _Giving(self._terms, self._seals, self._way_out, self._offload, state, round_).run()
        finally:
            self.is_busy = False


class _Giving:
    """The giving of one state."""

    def __init__(
        self, terms: Redundancy, seals: Seals, way_out: WayOut, offload: Offload, state: bytes, round_: int
    ) -> None:
        self._needed, self._seals, self._way_out, self._offload = terms.needed, seals, way_out, offload
        self._state = memoryview(state)
        self._plan = Label(round_, secrets.token_bytes(SALT_NBYTES), 0, terms.keepers, terms.needed, len(state))
        chosen = choose_keepers(way_out.transport.peer, way_out.transport.addresses(), way_out.others(), terms.keepers)
        self._keepers = dict(enumerate(chosen))  # by the numbers of their pieces; those that took all so far
        self._labels = {number: seals.label(self._plan, number) for number in self._keepers}
        self._sent, self._why = 0, ""

    async def run(self) -> GivenState:
        began = anyio.current_time()
        for stripe in range(self._plan.stripes):
            if not self._goes_on():
                break
            await self._let_others_pass()
            taken = anyio.current_time()
            chunks = await self._offload(self._seals.chunks, self._plan, stripe, self._state)
            await self._to_all({number: STRIPE.pack(stripe) + chunks[number] for number in self._keepers})
            await anyio.sleep(anyio.current_time() - taken)
        if self._goes_on():
            await self._to_all(dict.fromkeys(self._keepers, b""))
        enough = len(self._keepers) >= self._needed
        seconds = anyio.current_time() - began
        return GivenState(
            self._plan.round, tuple(self._keepers.values()), self._sent, seconds, "" if enough else self._why
        )

    def _goes_on(self) -> bool:
        """Tell whether enough are left for the pieces to be of use."""
        if not self._way_out.may_send():
            self._keepers, self._why = {}, "the day's upload is used up"
        here = len(self._keepers)
        self._why = self._why or f"members that are here beside this one: {here}, needed: {self._needed}"
        return here >= self._needed

    async def _let_others_pass(self) -> None:
        with anyio.move_on_after(PATIENCE):
            while not self._way_out.is_quiet():
                await anyio.sleep(LOOK_EVERY)

    async def _to_all(self, bodies: Mapping[int, bytes]) -> None:
        async with anyio.create_task_group() as group:
            for number, body in bodies.items():
                group.start_soon(self._to_one, number, body)

    async def _to_one(self, number: int, body: bytes) -> None:
        """Give a piece to a keeper; one that does not take it is not asked again for this state."""
        peer, whole = self._keepers[number], self._labels[number].to_bytes() + body
        try:
            answer = await request(self._way_out.transport, peer, KEEP, whole, limit=len(TAKEN), timeout=TIMEOUT)
            why = "" if answer == TAKEN else "has no room for it" if answer == FULL else "refused it"
            self._sent += len(whole)
        except (TransportError, PayloadError) as error:
            why = str(error)
        if why:
            del self._keepers[number]
            self._why = f"{peer_name(peer)} {why}"


# ---- who keeps a piece ----
#
# Members after this peer in the order of their ids, those of other machines first. A ring, so that in a swarm whose
# peers all have machines of their own everybody keeps for as many as keep for it. Pure.

Addresses = Mapping[PeerId, Sequence[str]]


def choose_keepers(me: PeerId, own: Sequence[str], others: Addresses, count: int) -> list[PeerId]:
    """Choose ``count`` of ``others``, or as many as there are, by their ids and addresses; ``own``: this peer's."""
    ring = sorted(others, key=lambda peer: (peer <= me, peer))
    taken, elsewhere = set(_hosts(own)), list[PeerId]()
    for peer in ring:
        hosts = set(_hosts(others[peer]))
        if not taken & hosts:
            elsewhere.append(peer)
            taken |= hosts
    rest = [peer for peer in ring if peer not in elsewhere]
    return [*elsewhere, *rest][:count]


def _hosts(addresses: Sequence[str]) -> Iterator[str]:
    """Return the machines that addresses name. A relay's is not that of the peer behind it; each has a loopback of its
    own.
    """
    for address in addresses:
        _, kind, host, *_ = (*address.split("/"), "", "", "")
        if kind in ("ip4", "ip6") and "/p2p-circuit" not in address and not _is_loopback(host):
            yield host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


# ---- a state as one run of bytes ----
#
# It is a safetensors file in memory, with a JSON document in its header.
#
# Format: safetensors 0.x, https://huggingface.co/docs/safetensors

_LENGTH_NBYTES = 8  # of the header's length, which a file begins with
_DOCUMENT = "document"

Json = Any  # what json.dumps takes: the caller's own document


def pack_state(tensors: Mapping[str, Tensor], document: Json) -> bytes:
    """Pack a state in one run of bytes; a copy."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    made: bytes = save({name: tensor.contiguous() for name, tensor in tensors.items()}, {_DOCUMENT: text})
    return made


def unpack_state(state: bytes) -> tuple[dict[str, Tensor], Json]:
    """Return what was packed. Raises PayloadError: then another version of this program packed it."""
    try:
        end = _LENGTH_NBYTES + int.from_bytes(state[:_LENGTH_NBYTES], "little")
        document = json.loads(json.loads(state[_LENGTH_NBYTES:end])["__metadata__"][_DOCUMENT])
        return dict(load(state)), document
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise PayloadError(f"kept state does not decode ({type(error).__name__}); another version gave it") from error
