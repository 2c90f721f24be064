"""One gossip step of a pair, or of a peer alone: as `decentral.rounds.gossip` makes it once both have committed."""

from __future__ import annotations

from collections.abc import Sequence

from decentral.lab.swarm.lab_peer import LabPeer
from decentral.replica.contribution import Contribution
from decentral.replica.pair_step import GossipStep, half_of, step_alone, step_together

__all__ = ["swap"]


def swap(peers: Sequence[LabPeer], made: Sequence[Contribution], step: int) -> tuple[int, float | None]:
    """Gossip step ``step`` of one or two peers; the bytes that each sent, and how far apart the two were."""
    fragment = made[0].fragment
    if len(peers) == 1:
        alone = step_alone(peers[0].replica, fragment, step, made[0].gradient_N, made[0].states)
        _take_over(peers[0], fragment, alone)
        return 0, None
    halves = [
        half_of(peer.replica, fragment, one.gradient_N, one.states) for peer, one in zip(peers, made, strict=True)
    ]
    theirs = [half.sent_CN for half in reversed(halves)]
    made_steps = [
        step_together(peer.replica, fragment, step, half, other_CN)
        for peer, half, other_CN in zip(peers, halves, theirs, strict=True)
    ]
    for peer, one in zip(peers, made_steps, strict=True):
        _take_over(peer, fragment, one)
    return max(len(half.body) for half in halves), made_steps[0].disagreement


def _take_over(peer: LabPeer, fragment: int, step: GossipStep) -> None:
    replica = peer.replica
    replica.anchors[fragment], replica.states[fragment] = step.after_N, step.state
    replica.feedback[fragment] = step.feedback
    peer.schedule.swapped(peer.live, fragment, step.after_N, unmoved=bool(step.unmoved))
    peer.schedule.given_up.clear()
    peer.live.averages.resume()
    peer.outer_step += 1
