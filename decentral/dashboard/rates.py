"""Bytes per second with each peer, from the counts of one status after another. Pure."""

from __future__ import annotations

from collections import deque

from decentral.observe.status import Status

WINDOW = 10.0  # s, as the peer's own rates
_MOST = 64  # statuses in a window: one a second, and some more
_WAYS = (("sent_per_second", "bytes_sent"), ("received_per_second", "bytes_received"))


class PeerRates:
    """Sees every status that is read."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[str, dict[str, int]]]] = deque(maxlen=_MOST)

    def see(self, status: Status) -> dict[str, dict[str, float]]:
        """By peer, the rates over the last seconds; empty before there are two statuses."""
        counts = {str(member.get("peer")): _counts(member) for member in status.members}
        if self._seen and self._seen[-1][0] >= status.updated:
            self._seen.pop()  # the same again
        self._seen.append((status.updated, counts))
        while len(self._seen) > 2 and status.updated - self._seen[0][0] > WINDOW:
            self._seen.popleft()
        then, before = self._seen[0]
        elapsed = status.updated - then
        if elapsed <= 0:
            return {}
        return {
            peer: {rate: max(0, now[count] - before[peer][count]) / elapsed for rate, count in _WAYS}
            for peer, now in counts.items()
            if peer in before
        }


def _counts(member: object) -> dict[str, int]:
    get = getattr(member, "get", lambda key: None)
    return {count: int(get(count) or 0) for _, count in _WAYS}
