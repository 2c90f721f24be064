"""The transport of a peer as its person allows it: caps, a day's upload, and votes ahead of frames."""

from __future__ import annotations

from decentral.peer.daily_upload import DailyUpload
from decentral.peer.hello import HELLO
from decentral.rounds.carrier import CONTROL
from decentral.rounds.gossip import PAIR
from decentral.swarm.directory import LEASE, LEASES
from decentral.transport import Transport
from decentral.transport.dialback import DIALBACK
from decentral.transport.throttle import Caps, ThrottledTransport

URGENT = (CONTROL, LEASE, LEASES, HELLO, PAIR, DIALBACK)  # what a swarm must hear in time; all else is bulk


def throttled(inner: Transport, caps: Caps, daily: DailyUpload | None) -> ThrottledTransport:
    """Also without caps: it measures the uplink."""

    def may_upload() -> bool:
        if daily is None:
            return True
        daily.count(inner.traffic.total.sent)
        return daily.may_upload

    return ThrottledTransport(inner, caps, urgent=URGENT, may_upload=may_upload)
