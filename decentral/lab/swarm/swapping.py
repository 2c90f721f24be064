"""One gossip step of a pair, or of a peer alone: as `decentral.rounds.pairs` makes it once both have committed."""

from __future__ import annotations

from collections.abc import Sequence

from decentral.lab.swarm.lab_peer import LabPeer
from decentral.replica.contribution import Contribution
from decentral.replica.pair_step import GossipStep, Half, install, step_alone, step_together

__all__ = ["step_apart", "step_as_pair"]


def step_apart(peer: LabPeer, made: Contribution, step: int) -> None:
    """Gossip step ``step`` of a peer without a partner."""
    alone = step_alone(peer.replica, made.fragment, step, made.gradient_N, made.states)
    _take_over(peer, made.fragment, alone)


def step_as_pair(peers: Sequence[LabPeer], fragment: int, halves: Sequence[Half], step: int) -> None:
    """Gossip step ``step`` of two peers, by what each sends."""
    theirs = [half.sent_CN for half in reversed(halves)]
    steps = [
        step_together(peer.replica, fragment, step, half, other_CN)
        for peer, half, other_CN in zip(peers, halves, theirs, strict=True)
    ]
    for peer, one in zip(peers, steps, strict=True):
        _take_over(peer, fragment, one)


def _take_over(peer: LabPeer, fragment: int, step: GossipStep) -> None:
    install(peer.replica, fragment, step)
    peer.schedule.swapped(peer.live, fragment, step.after_N, unmoved=bool(step.unmoved))
    peer.schedule.given_up.clear()
    peer.live.averages.resume()
    peer.outer_step += 1
