"""What a manifest means to the parts of a peer: its replica, and the terms of its rounds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from decentral.compressors import parse_compressor
from decentral.consensus.chain import Voting
from decentral.consensus.round_state import RoundTerms, RunClock
from decentral.dissemination.reduce import Grain, partition, shares
from decentral.manifest import Manifest, rule_of
from decentral.node.uplinks import Uplinks
from decentral.optimizers import make_outer
from decentral.parameters import Schema
from decentral.replica.codec import Codec, codec_of
from decentral.replica.contents import Tail
from decentral.replica.replica import Replica
from decentral.wire.frames import FrameKind
from decentral.wire.keys import PeerId


def make_replica(
    manifest: Manifest, schema: Schema, anchors: Sequence[Tensor], buffers_B: Tensor | None = None
) -> Replica:
    """Anchor, buffers, outer optimizer and codec as the manifest says."""
    outer = manifest.outer
    codec = codec_of(manifest)
    codec.warm_up()
    return Replica(
        schema,
        anchors,
        make_outer(outer.method, outer.hyper),
        codec,
        Codec(parse_compressor("none")),
        manifest.weighting,
        buffers_B,
        Tail.of(schema, manifest.model.buffers or "average"),
        rule_of(manifest),
    )


def largest_offer(replica: Replica, gossips: bool, fragments: int) -> int:
    """Bytes of the largest body that a peer may offer: a contribution, whole or in slices, or what gossip merges."""
    codec, channels = (replica.merge_codec, 1) if gossips else (replica.codec, len(replica.method.channels()))
    whole = [replica.shapes(f) * channels for f in range(fragments)]
    shapes = [*whole, *(((replica.numel(f),),) * channels for f in range(fragments))]
    return max(codec.max_body_nbytes(one, channels) for one in shapes) + replica.tail.nbytes(0)


def make_terms(
    manifest: Manifest, replica: Replica, uplinks: Uplinks, grain: Grain, clock: RunClock, voting: Voting
) -> RoundTerms:
    """What the round machine needs of the manifest and of the links."""

    def ranges(fragment: int, owners: tuple[PeerId, ...]) -> tuple[tuple[PeerId, int, int], ...]:
        return partition(replica.numel(fragment), owners, shares(uplinks.for_owners(owners)), grain)

    swarm, fragments = manifest.swarm, manifest.outer.fragments
    gossips, method = not replica.agrees, replica.method
    return RoundTerms(
        num_fragments=fragments,
        rounds=fragments if gossips else manifest.run.rounds,  # gossip commits only the merge at the end
        min_peers=swarm.min_peers,
        floor=swarm.deadline_floor,
        ceiling=swarm.deadline_ceiling,
        patience=max(2.0, swarm.deadline_floor),
        partition=ranges if uplinks.reduces else None,
        steps=0 if manifest.inner.pace == "clock" else manifest.inner.steps // fragments,  # all are full then
        overlaps=manifest.outer.overlap > 0,
        largest=largest_offer(replica, gossips, fragments),
        takes=uplinks.takes,
        quorum=method.quorum.peers,
        grace=method.quorum.grace,
        max_staleness=method.max_staleness * fragments,
        offered=FrameKind.MERGE if gossips else FrameKind.CONTRIBUTION,
        states=lambda outer_step: 0 if gossips else len(replica.due(outer_step)) - 1,
        clock=clock,
        voting=voting,
    )
