"""What the round machine asks its shell to do. Data only; the shell carries it out in order."""

from __future__ import annotations

from dataclasses import dataclass

from decentral.consensus.acceptor import Acceptor
from decentral.consensus.chain import Digest
from decentral.wire.keys import PeerId
from decentral.wire.messages import Commit, Message, Record, ReducePlan


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to one peer; a failure comes back as ``unreachable``."""

    to: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Persist:
    """Make the acceptor durable before any later effect is carried out."""

    acceptor: Acceptor


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get a frame from any of these holders, likeliest first; it comes back as ``hold``."""

    frame: Digest
    owner: PeerId  # the peer that made it and may be sending it now
    holders: tuple[PeerId, ...]
    record: Record | None = None  # that names it; of a reduce it says how large a result is, if the plan never came


@dataclass(frozen=True, slots=True)
class SendSlices:
    """Send each owner of ``plan`` its slice of this peer's contribution, and reduce the partition owned here."""

    plan: ReducePlan


@dataclass(frozen=True, slots=True)
class Decide:
    """Log the commit durably, then apply it, then call ``applied``. Every named frame is held."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class CatchUpWith:
    """This peer missed commits: fetch them from ``peer``, which is ahead, or is on another branch."""

    peer: PeerId


Effect = Send | Persist | Fetch | SendSlices | Decide | CatchUpWith
