"""When no round has ended for many times as long as one takes: since when, and what the round in progress waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from decentral.node.node import Node
from decentral.observe.health import in_units, listed
from decentral.training.reporting import Reporter
from decentral.wire.keys import PeerId, peer_name

TIMES = 5.0  # usual rounds: two deaths in one round, whose leases run out one after the other, take three
ALONE = 4  # gossip steps in a row without a partner


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRound:
    """What this peer knows of the round in progress."""

    me: PeerId
    members: Sequence[PeerId]
    present: Sequence[PeerId]  # those of them that are here
    min_peers: int
    voters: Sequence[PeerId] = ()  # none: all members
    offerers: Sequence[PeerId] = ()  # whose offers come here; none: all members
    offered: Mapping[PeerId, int] = field(default_factory=dict)  # bytes of each contribution that was offered
    arrived: Sequence[PeerId] = ()  # whose contributions are here whole, in a reduce all that are offered
    sent_per_second: float = 0.0  # bytes
    received_per_second: float = 0.0


def why_open(seen: OpenRound) -> str:
    """What the round waits for, most telling first."""
    here, voters = len(seen.present), seen.voters or seen.members
    if here < seen.min_peers:
        return f"it takes {seen.min_peers} peers (swarm.min_peers), and {here} are here"
    absent = [peer for peer in voters if peer not in seen.present]
    if 2 * len(absent) >= len(voters):
        return f"a majority of {len(voters)} members has to vote, and {_names(absent)} cannot be reached"
    if seen.me in seen.members and seen.me not in seen.offered:
        return "this peer's own loop has not made the inner steps of the round"
    if late := [peer for peer in seen.offerers or seen.members if peer in seen.present and peer not in seen.offered]:
        return f"nothing was offered by {_names(late)}"
    rates = f"{in_units(seen.received_per_second)}/s come in and {in_units(seen.sent_per_second)}/s go out"
    if missing := [peer for peer in seen.offered if peer not in seen.arrived]:
        nbytes = sum(seen.offered[peer] for peer in missing)
        return f"{in_units(nbytes)} of {_names(missing)} have not come, and {rates}: a line may be too thin"
    return f"all have offered, and votes or what others lack are under way: {rates}"


def stall_of(node: Node, counted: Reporter, now: float, rates: tuple[float, float]) -> tuple[float, str]:
    """Seconds without a round and why; (0, "") while that is as usual. ``rates``: bytes/s sent and received."""
    if not node.ready.is_set() or node.driver.head.final:
        return 0.0, ""
    if node.gossip is not None:
        return _unpaired(counted)
    round_, usual = node.driver.machine.state.round, counted.usual_round
    if round_.first_offer is not None:
        seconds = now - round_.first_offer
    else:  # before the first round nobody knows how long inner steps take
        seconds = 0.0 if usual is None else counted.since_round
    ceiling = node.manifest.swarm.deadline_ceiling
    if seconds <= max(TIMES * (usual or 0.0), 2 * (ceiling + node.driver.allowed)):
        return 0.0, ""
    return seconds, why_open(_seen(node, rates))


def _seen(node: Node, rates: tuple[float, float]) -> OpenRound:
    state, (up, down) = node.driver.machine.state, rates
    members = state.head.members
    channels = state.terms.states(state.head.outer_step)
    return OpenRound(
        me=state.me,
        members=members,
        present=[peer for peer in members if peer == state.me or state.presence.present(peer)],
        min_peers=node.manifest.swarm.min_peers,
        voters=state.committee,
        offerers=state.offerers,
        offered={peer: offer.nbytes for peer, offer in state.round.offers.items()},
        arrived=state.round.usable(state.head, state.held, state.terms.named, channels),
        sent_per_second=up,
        received_per_second=down,
    )


def _unpaired(counted: Reporter) -> tuple[float, str]:
    """A gossip step ends by itself, alone where nobody comes."""
    last = counted.outcomes[-ALONE:]
    if len(last) < ALONE or any(last):
        return 0.0, ""
    return counted.since_contributed, f"nobody to pair with: the last {len(last)} steps were taken alone"


def _names(peers: Sequence[PeerId]) -> str:
    return listed([peer_name(peer) for peer in peers])
