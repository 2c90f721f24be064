"""The status of a peer that talks to the swarm, made from what it is given to show. Runs on the swarm's loop."""

from __future__ import annotations

from dataclasses import dataclass

import anyio

from decentral.flow.upload import lease_bits
from decentral.manifest import Manifest
from decentral.node.node import Node
from decentral.observe.status import Status
from decentral.peer.participation import Participation
from decentral.peer.shown.stall import stall_of
from decentral.training.reporting import Reporter
from decentral.transport import Transport
from decentral.wire.keys import peer_name
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
