"""A peer that is left alone goes on by itself, round after round, with frames that go in pieces."""

from __future__ import annotations

import pytest
import torch

from decentral.dissemination.broadcast import PIECED
from decentral.manifest import preset_manifest
from decentral.parameters import schema_of

UPLINK = 625_000.0  # bytes/s


def one_tensor():
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(2 * PIECED // 1024, 256))
    return schema_of(model, 1)


def gather():
    limits = {"lease": 3.0, "shrink_after": 6.0, "deadline_floor": 1.0, "deadline_ceiling": 8.0, "min_peers": 1}
    compressor = {"chain": "none", "feedback": "none"}
    return preset_manifest("sparseloco", run={"rounds": 1000, "salt": "alone"}, swarm=limits, compressor=compressor)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_peer_left_alone_goes_on_round_after_round_with_frames_that_go_in_pieces(run_lab, size):
    """It knew its uplink from when others were there, and divided it by the number of those who were left."""

    async def script(lab):
        for _ in range(size):
            member = lab.add()
            lab.network.set_uplink(member.signer.peer, UPLINK)
            member.node.uplink = lambda: UPLINK
        await lab.all_members()
        await lab.rounds(2)
        last, *others = lab.members
        for member in others:
            member.kill()
        await lab.until(lambda: last.node.driver.head.members == (last.signer.peer,))
        sent = last.transport.traffic.total.sent
        await lab.rounds(5)
        assert all(len(commit.record.frames) == 1 for commit in last.log[-5:])
        newest = last.log[-1].record.frames[0].frame
        assert len(last.node.driver.state.find_stored(newest).data) >= PIECED
        assert last.transport.traffic.total.sent - sent < PIECED, "it sent its frames to somebody"
        lab.check_equal()

    run_lab(gather(), script, schema=one_tensor())


def test_a_peer_that_was_left_alone_knows_its_uplink_still_when_somebody_comes(run_lab):
    """Frames for nobody counted as frames of which nothing arrived, and sixteen of them were all that it remembered."""

    async def script(lab):
        for _ in range(2):
            lab.network.set_uplink(lab.add().signer.peer, UPLINK)
        await lab.all_members()
        alone, other = lab.members
        await lab.until(lambda: alone.transport.meter.bytes_per_second)
        other.kill()
        await lab.until(lambda: alone.node.driver.head.members == (alone.signer.peer,))
        known = alone.transport.meter.bytes_per_second
        await lab.rounds(20)
        assert alone.transport.meter.bytes_per_second == known

    run_lab(gather(), script, schema=one_tensor())
