"""The only records that a peer stores for others in the DHT: signed leases of its run, each under its signer's name.

Without it anybody could fill this process's memory with records of any kind, or overwrite another peer's lease.
Importing this imports hivemind, and with it torch.
"""

from __future__ import annotations

from typing import TypeVar

from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import get_dht_time

from decentral.errors import PayloadError
from decentral.swarm.leases import MAX_LEASE_NBYTES, read_lease
from decentral.wire.keys import Digest, PeerId, peer_name
from decentral.wire.messages import MAX_PEERS

SKEW = 300.0  # s two machines' clocks may differ before a record is refused
T = TypeVar("T")
_KEPT = 4 * MAX_PEERS  # peers whose records are taken; identities cost nothing to make


class LeaseValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """Accepts a record when it is a lease of ``run`` under ``key``, its sub-key the name of the peer that signed it."""

    def __init__(self, key: str, run: Digest) -> None:
        self._key, self._run = DHTID.generate(source=key).to_bytes(), run
        self._ends: dict[PeerId, float] = {}  # when each peer's record ends, in DHT time

    def validate(self, record: DHTRecord) -> bool:
        """See hivemind's RecordValidatorBase. Never raises."""
        now = get_dht_time()
        if record.key != self._key or len(record.value) > MAX_LEASE_NBYTES + 8:
            return False
        try:
            lease = read_lease(_unpacked(record.value, bytes))
            name = _unpacked(record.subkey, str)
        except (PayloadError, ValueError):
            return False
        if lease.run != self._run or name != peer_name(lease.peer):
            return False
        return record.expiration_time <= now + lease.ttl + SKEW and self._fits(lease.peer, record.expiration_time, now)

    def _fits(self, peer: PeerId, end: float, now: float) -> bool:
        if peer not in self._ends and len(self._ends) >= _KEPT:
            self._ends = {other: other_end for other, other_end in self._ends.items() if other_end > now}
            if len(self._ends) >= _KEPT:
                return False
        self._ends[peer] = max(end, self._ends.get(peer, 0.0))
        return True


def _unpacked(data: bytes, kind: type[T]) -> T:
    """One msgpack value of a plain kind. ValueError for anything else, msgpack's own errors among them."""
    try:
        value = MSGPackSerializer.loads(data)
    except Exception as error:  # its decoder's errors share no base, and RecursionError is among them
        raise ValueError("not msgpack") from error
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} where {kind.__name__} belongs")
    return value
