"""What a method is told of a round: the numbers of the record, counted as contributors count them."""

from __future__ import annotations

import torch

from decentral.consensus.chain import Head
from decentral.manifest import preset_manifest
from decentral.node.node import make_replica
from decentral.parameters import schema_of
from decentral.replica.apply import round_info
from decentral.replica.replica import Replica
from decentral.wire.keys import Signer
from decentral.wire.messages import FrameRef, Record

ME = Signer(bytes(32)).peer
START = Head.genesis(bytes(32), bytes(32), bytes(32), ME)


def replica(fragments: int) -> Replica:
    manifest = preset_manifest("des_loc", run={"rounds": 10}, outer={"fragments": fragments})
    schema = schema_of(torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(fragments))), fragments)
    return make_replica(manifest, schema, [torch.zeros(f.numel) for f in schema.fragments], torch.zeros(0))


def record(outer_step: int, fragment: int, based: int) -> Record:
    """The one that follows a head that has ``outer_step`` outer steps behind it."""
    ref = FrameRef(ME, bytes(32), 0, 1, 1, based)
    head = (START.run, 0, outer_step + 1, outer_step, fragment, 0, START.hash, bytes(32))
    return Record(*head, (ME,), (ref,), (), (), (ME,), False)


def test_the_first_record_of_a_fragment_is_its_step_0_and_who_began_then_is_of_age_0():
    given = replica(fragments=1)
    first = round_info(given, record(0, 0, based=0), [1.0])
    assert (first.step, first.contributors[0].age) == (0, 0)
    late = round_info(given, record(5, 0, based=3), [1.0])
    assert (late.step, late.contributors[0].age) == (5, 2)


def test_steps_and_ages_are_counted_by_fragment():
    given = replica(fragments=2)
    told = round_info(given, record(5, 1, based=1), [1.0])
    assert (told.step, told.contributors[0].age) == (2, 2)


def test_the_channels_of_a_record_are_those_that_its_contributors_sent():
    given = replica(fragments=1)
    assert [len(given.due(step)) for step in range(6)] == [1, 1, 2, 1, 1, 3]
