"""What a manifest means to the parts of a peer: its replica, and the terms of its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from decentral.compressors import parse_compressor, parse_feedback
from decentral.exchange.codec import Codec
from decentral.exchange.partition import Grain, partition, shares
from decentral.manifest import Manifest
from decentral.optimizers import DiLoCo, OuterOptimizer, make_outer, outer_learning_rate
from decentral.parameters import Schema
from decentral.peer.uplinks import Uplinks
from decentral.rounds.machine import Terms
from decentral.rounds.replica import Replica
from decentral.wire.keys import PeerId


def make_replica(manifest: Manifest, schema: Schema, anchors: Sequence[Tensor]) -> Replica:
    """Anchor, outer optimizer and codec as the manifest says."""
    outer = manifest.outer
    given = {"lr": outer.learning_rate, "momentum": outer.momentum, "alpha": outer.alpha}
    given |= {"beta": outer.beta, "gamma": outer.gamma}
    made = make_outer(outer.method, {name: value for name, value in given.items() if value is not None})
    codec = Codec(parse_compressor(manifest.compressor.chain), parse_feedback(manifest.compressor.feedback))
    codec.warm_up()
    by_peers = outer.learning_rate is None and isinstance(made, DiLoCo)
    return Replica(
        schema,
        anchors,
        made,
        codec,
        Codec(parse_compressor("none")),
        _lr_by_peers if by_peers else None,
        outer.weighting or "equal",
        outer.norm_clip or "none",
    )


def _lr_by_peers(outer: OuterOptimizer, num_peers: int) -> OuterOptimizer:
    """DiLoCo's outer learning rate for as many contributors as this very commit names: the same on every peer."""
    assert isinstance(outer, DiLoCo)
    return replace(outer, lr=outer_learning_rate(num_peers))


def largest_offer(replica: Replica, gossips: bool, fragments: int) -> int:
    """Bytes of the largest body that a peer may offer: a contribution, whole or in slices, or what gossip merges."""
    codec = replica.merge_codec if gossips else replica.codec
    shapes = [*map(replica.shapes, range(fragments)), *(((replica.numel(f),),) for f in range(fragments))]
    return max(map(codec.max_body_nbytes, shapes))


def make_terms(manifest: Manifest, replica: Replica, uplinks: Uplinks, grain: Grain) -> Terms:
    """What the round machine needs of the manifest and of the links."""

    def ranges(fragment: int, owners: tuple[PeerId, ...]) -> tuple[tuple[PeerId, int, int], ...]:
        return partition(replica.numel(fragment), owners, shares(uplinks.for_owners(owners)), grain)

    swarm, fragments = manifest.swarm, manifest.outer.fragments
    gossips = manifest.exchange.kind == "pair"
    return Terms(
        num_fragments=fragments,
        rounds=fragments if gossips else manifest.run.rounds,  # gossip commits only the merge at the end
        min_peers=swarm.min_peers,
        floor=swarm.deadline_floor,
        ceiling=swarm.deadline_ceiling,
        patience=max(2.0, swarm.deadline_floor),
        partition=ranges if uplinks.reduces else None,
        steps=manifest.inner.steps // fragments,
        largest=largest_offer(replica, gossips, fragments),
        takes=uplinks.takes,
    )
