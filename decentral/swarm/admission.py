"""Admission by token: a peer proves that it knows the token of the invites, which never crosses the wire.

Crosses the wire: 32 bytes each way, once per 10 s and pair of peers that have something to say to one another, and
the same 32 with a greeting. A proof is a keyed hash of the run, of who proves and to whom; the transport has shown
who both are, so a proof that is passed on is worth nothing, and the token itself is never sent.

Without a proof one gets a refusal to its greeting, leases, and what any public libp2p peer gives: whether it can be
dialled, and speed. Not defended against: a member that tells the token to others, or passes on what it learns.
"""

from __future__ import annotations

import hashlib
import hmac

import anyio

from decentral.errors import PayloadError, PeerUnreachable, UsageError
from decentral.swarm.invite import MAX_TOKEN
from decentral.transport import Transport
from decentral.transport.base import Handler, Stream
from decentral.transport.requests import request, serve_requests
from decentral.transport.throttle import Caps, ThrottledStream, ThrottledTransport
from decentral.wire.keys import Digest, PeerId, peer_name

ADMISSION = "/decentral/admission/1"
PROOF_NBYTES = 32
MIN_TOKEN = 12  # characters: whom a peer proves itself to can try words against the proof
_AGAIN = 10.0  # s after which a peer introduces itself anew: the other may have been restarted
_TIMEOUT = 10.0  # s
_KNOWN = 4096  # peers remembered; four times as many as a run can have


def check_token(token: str) -> str:
    """The token itself. Raises UsageError for one that is easily guessed, or that no invite can carry."""
    visible = token.isascii() and token.isprintable() and " " not in token
    if not (visible and MIN_TOKEN <= len(token) <= MAX_TOKEN):
        raise UsageError(
            f"admission token of {len(token)} characters: want {MIN_TOKEN} to {MAX_TOKEN} visible ASCII ones without "
            "spaces; openssl rand -hex 16 makes one"
        )
    return token


class Admission:
    """The proofs of one peer: its own for the others, and those of the others here."""

    def __init__(self, token: str, run: Digest, me: PeerId) -> None:
        self.me, self._run = me, run
        self._key = hashlib.blake2b(token.encode(), digest_size=32, person=b"decentral-admit").digest()
        self._known: dict[PeerId, None] = {}  # the oldest first

    def proof(self, to: PeerId) -> bytes:
        """Return the proof that this peer knows the token, for ``to`` alone."""
        return self._proof(self.me, to)

    def take(self, peer: PeerId, proof: bytes) -> bool:
        """Admit ``peer`` if its proof shows that it knows the token; tell whether it does."""
        if not hmac.compare_digest(proof, self._proof(peer, self.me)):
            return False
        self._known[peer] = None
        if len(self._known) > _KNOWN:
            del self._known[next(iter(self._known))]
        return True

    def admits(self, peer: PeerId) -> bool:
        """Tell whether a peer has proved itself to this process."""
        return peer in self._known

    def _proof(self, prover: PeerId, to: PeerId) -> bytes:
        return hashlib.blake2b(self._run + prover + to, digest_size=PROOF_NBYTES, key=self._key).digest()


class AdmittingTransport(ThrottledTransport):
    """A transport whose protocols, but those ``open_to_all``, are spoken with admitted peers only."""

    def __init__(
        self, inner: Transport, caps: Caps, *, admission: Admission, open_to_all: frozenset[str], **given: object
    ) -> None:
        super().__init__(inner, caps, **given)  # type: ignore[arg-type]  # the throttle's own, by their names
        self.admission, self._open_to_all = admission, open_to_all | {ADMISSION}
        self._introduced: dict[PeerId, float] = {}
        serve_requests(self, ADMISSION, self._on_proof, limit=PROOF_NBYTES)

    def serve(self, protocol: str, handler: Handler) -> None:
        """Answer streams of ``protocol`` by ``handler``."""

        async def attend_admitted(stream: Stream) -> None:
            if not self.admission.admits(stream.peer):
                raise PayloadError(f"{peer_name(stream.peer)}: not admitted to the run; {protocol} is not for it")
            await handler(stream)

        super().serve(protocol, handler if protocol in self._open_to_all else attend_admitted)

    async def open(self, peer: PeerId, protocol: str) -> ThrottledStream:
        """Open a stream to ``peer``. PeerUnreachable also when either does not admit the other."""
        if protocol not in self._open_to_all:
            await self._introduce(peer)
        return await super().open(peer, protocol)

    async def _introduce(self, peer: PeerId) -> None:
        """Prove itself to ``peer``, which answers with a proof of its own."""
        now = anyio.current_time()
        if self.admission.admits(peer) and now - self._introduced.get(peer, -_AGAIN) < _AGAIN:
            return
        proof = self.admission.proof(peer)
        answer = await request(self, peer, ADMISSION, proof, limit=PROOF_NBYTES, timeout=_TIMEOUT)
        if not self.admission.take(peer, answer):
            raise PeerUnreachable(f"{peer_name(peer)}: it and this peer do not admit one another; drop it")
        if len(self._introduced) > _KNOWN:
            self._introduced.clear()
        self._introduced[peer] = now

    async def _on_proof(self, peer: PeerId, proof: bytes) -> bytes:
        return self.admission.proof(peer) if self.admission.take(peer, proof) else b""
