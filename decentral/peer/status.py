"""The status of a peer that talks to the swarm, and why its round stays open. Made on the swarm's loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import anyio

from decentral.flow.uplink import lease_bits
from decentral.manifest import Manifest
from decentral.node.node import Node
from decentral.observe.health import in_units, listed
from decentral.observe.status import Status
from decentral.peer.participation import Participation
from decentral.training.reporting import Reporter
from decentral.transport import Transport
from decentral.wire.keys import PeerId, peer_name
from decentral.wire.messages import PRIVATE, Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One peer as it is now."""

    manifest: Manifest
    part: Participation
    notices: tuple[str, ...]
    inner_steps: int
    done: bool
    paused: bool
    leaving: bool

    @property
    def node(self) -> Node:
        """Its swarm side."""
        return self.part.swarm.node

    @property
    def counted(self) -> Reporter:
        """What it has counted."""
        return self.part.reporter

    @property
    def transport(self) -> Transport:
        """What carries its bytes."""
        return self.part.swarm.transport


def status_of(shown: Shown) -> Status:
    """Everything that a status tells."""
    node, counted, traffic = shown.node, shown.counted, shown.transport.traffic
    measuring = node.speed.count
    sent, received = traffic.total.sent - measuring.sent, traffic.total.received - measuring.received
    up, down = counted.rates(sent, received)
    outcomes, fetched = counted.outcomes, node.catch_up.snapshots.under_way
    stalled_seconds, stalled_by = stall_of(node, counted, anyio.current_time(), (up, down))
    head = node.driver.head
    return Status(
        state=state_of(shown),
        peer=peer_name(node.driver.me),
        run=shown.manifest.run.name,
        run_id=shown.manifest.digest.hex(),
        algorithm=shown.manifest.outer.method,
        round=node.outer_steps,
        rounds=shown.manifest.run.rounds,
        epoch=head.epoch,
        inner_steps=shown.inner_steps,
        members=tuple(_member(shown, member) for member in head.members),
        given_up=tuple(peer_name(member) for member in sorted(node.driver.given_up)),
        waiting_for=_awaited(node) if counted.stands_still else (),
        stalled_seconds=stalled_seconds,
        stalled_by=stalled_by,
        usual_round_seconds=counted.usual_round,
        held_seconds=counted.usual_hold,
        checkpoint_held_seconds=counted.usual_checkpoint_hold,
        wanted_members=counted.wanted_members,
        gone=tuple(peer_name(member) for member in sorted(node.company.gone)),
        gone_left=node.company.left,
        rounds_seen=len(outcomes),
        rounds_contributed=sum(outcomes),
        bytes_sent=sent,
        bytes_received=received,
        bytes_measuring=measuring.sent,
        bytes_per_round=counted.sent_per_round(sent),
        model_here=fetched[0],
        model_nbytes=fetched[1],
        sent_per_second=up,
        received_per_second=down,
        max_upload=shown.part.links.caps.up,
        max_download=shown.part.links.caps.down,
        daily_upload=None if node.daily_upload is None else node.daily_upload.limit,
        sent_today=0 if node.daily_upload is None else node.daily_upload.sent,
        uplink_bits=lease_bits(node.uplink()),
        next_sync_seconds=counted.next_round_in,
        seconds_left=_left(shown),
        loss=counted.loss,
        notices=shown.notices,
        diagnostics=shown.part.diagnosed.now.values,
        diagnosed_round=shown.part.diagnosed.now.outer_step,
        diagnosed_part=shown.part.diagnosed.now.of_part,
        out_of_band=shown.part.diagnosed.out,
        held_out_loss=counted.held_out_loss,
        num_parameters=sum(anchor_N.numel() for anchor_N in node.replica.anchors),
        open_round=_open_round(node),
        kinds={_kind(protocol): [count.sent, count.received] for protocol, count in traffic.kinds.items()},
        own_loop=True,
        trains_while_paused=True,
        anchor_digest=node.replica.digest.hex(),
        invite=shown.part.invite,
        addresses=shown.transport.addresses(),
        reachability=shown.part.network.kind,
        relays=shown.part.network.relays,
    )


def state_of(shown: Shown) -> str:
    """In one word."""
    node, counted = shown.node, shown.counted
    if shown.done:
        return "leaving" if shown.leaving else "done"
    if node.state in ("leaving", "syncing"):
        return str(node.state)
    if not node.ready.is_set():
        return "starting"
    if shown.paused:
        return "paused"
    if counted.wanted_members:
        return "waiting"
    if node.resting:
        return "resting"
    if counted.stands_long:
        return "waiting"
    alone = not node.directory.live()
    return "looking" if alone else "training"


def _member(shown: Shown, member: bytes) -> dict[str, object]:
    node = shown.node
    lease = node.directory.live().get(member)
    here = member == node.driver.me
    count = shown.transport.traffic.of(member)
    return {
        "peer": peer_name(member),
        "self": here,
        "live": here or lease is not None,
        "left": not here and lease is None and (shown.done or node.directory.said_goodbye(member)),
        "round": node.outer_steps if here else _round_of(node, lease),
        "bytes_sent": count.sent,
        "bytes_received": count.received,
        **({} if here else _way(shown, member)),
    }


def _round_of(node: Node, lease: Lease | None) -> int | None:
    """Outer steps of another member, from the height that its lease tells; in gossip none tells them."""
    if lease is None or node.gossip is not None:
        return None
    return node.driver.machine.state.history.outer_steps_at(lease.round)


def _way(shown: Shown, member: bytes) -> dict[str, object]:
    """How a member is reached; directly although both are private is punched."""
    node = shown.node
    path, lease = node.paths.get(member), node.directory.live().get(member)
    if path is None and lease is not None:
        node.paths.look_soon()  # the next status has it
    hidden = lease is not None and bool(lease.state & PRIVATE) and shown.part.network.is_private
    names = {None: None, False: "relayed", True: "punched" if hidden else "direct"}
    return {
        "path": names[None if path is None else path.direct],
        "relayed_share": None if path is None else round(path.relayed_share, 3),
        "answers_in": node.directory.answered_in.get(member),
        "seen": node.directory.heard(member),
        "uplink_bits": 0 if lease is None else lease.uplink,
    }


def _open_round(node: Node) -> dict[str, object] | None:
    """What this peer knows of the round in progress; None where there is none, as in gossip and at the end."""
    if node.gossip is not None or not node.ready.is_set() or node.driver.head.final:
        return None
    state, head = node.driver.machine.state, node.driver.head
    ballot, leading = max(0, state.acceptor.promised), state.leading
    voted = leading is not None and leading.proposal is not None
    return {
        "round": head.outer_step + 1,
        "members": len(state.offerers),  # of a large swarm those of whom this peer hears what they offer
        "offers": sum(peer in state.round.offers for peer in state.offerers),
        "leader": peer_name(state.leader_of(ballot)),
        "ballot": ballot,
        "proposed": voted or state.proposal is not None,
        "votes": len(leading.votes) if leading is not None and voted else None,  # they go to the leader only
        "seconds": round(anyio.current_time() - state.round.opened, 3),
    }


def _kind(protocol: str) -> str:
    """``frame`` of ``/decentral/frame/1``."""
    return protocol.split("/")[-2] if protocol.count("/") > 2 else protocol


def _awaited(node: Node) -> tuple[str, ...]:
    machine = node.driver.machine
    offered = set(machine.state.round.offers)
    absent = [p for p in machine.state.offerers if p not in offered and machine.state.presence.present(p)]
    return tuple(peer_name(p) for p in absent)


def _left(shown: Shown) -> float | None:
    """Seconds until the last round, or until the run's time is up; None: neither is known."""
    run, known = shown.manifest.run, []
    if (usual := shown.counted.own_round) is not None:
        known.append(max(0, run.rounds - shown.node.outer_steps) * usual)
    if run.minutes is not None:
        known.append(max(0.0, 60 * run.minutes - shown.node.age))
    return min(known, default=None)


# ---- a stall ----
#
# When no round has ended for many times as long as one takes: since when, and what the round in progress waits for.

STALLED_AFTER = 5.0  # usual rounds: two deaths in one round, whose leases run out one after the other, take three
STEPS_ALONE = 4  # gossip steps in a row without a partner


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
    if seconds <= max(STALLED_AFTER * (usual or 0.0), 2 * (ceiling + node.driver.allowed)):
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
    last = counted.outcomes[-STEPS_ALONE:]
    if len(last) < STEPS_ALONE or any(last):
        return 0.0, ""
    return counted.since_contributed, f"nobody to pair with: the last {len(last)} steps were taken alone"


def _names(peers: Sequence[PeerId]) -> str:
    return listed([peer_name(peer) for peer in peers])
