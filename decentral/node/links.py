"""The transport of a peer as its person allows it: caps, a day's upload, and votes ahead of frames."""

from __future__ import annotations

from decentral.node.daily_upload import DailyUpload
from decentral.rounds.frame_io import CONTROL
from decentral.rounds.gossip import PAIR
from decentral.swarm.admission import ADMISSION, Admission, AdmittingTransport
from decentral.swarm.hello import HELLO
from decentral.swarm.lease_messages import LEASE, LEASE_LIST, LEASES
from decentral.transport import Transport
from decentral.transport.dialback import DIALBACK
from decentral.transport.speed import SPEED
from decentral.transport.throttle import Caps, ThrottledTransport

URGENT = (
    CONTROL,
    LEASE,
    LEASE_LIST,
    LEASES,
    HELLO,
    PAIR,
    DIALBACK,
    ADMISSION,
)  # what a swarm must hear in time; all else is bulk
OPEN_TO_ALL = frozenset({HELLO, LEASE, LEASES, DIALBACK, SPEED})  # also where a run admits by token


def throttled(
    inner: Transport, caps: Caps, daily: DailyUpload | None, admission: Admission | None = None
) -> ThrottledTransport:
    """Also without caps: it measures the uplink. With ``admission`` it serves nobody who was not admitted."""

    def may_upload() -> bool:
        if daily is None:
            return True
        daily.count(inner.traffic.total.sent)
        return daily.may_upload

    if admission is None:
        return ThrottledTransport(inner, caps, urgent=URGENT, may_upload=may_upload)
    return AdmittingTransport(
        inner, caps, admission=admission, open_to_all=OPEN_TO_ALL, urgent=URGENT, may_upload=may_upload
    )
