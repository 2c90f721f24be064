"""What a frame holds is read from its bytes once by each peer that it came to, and never by who made it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from decentral.wire import body
from tests.kit.nodes import scene
from tests.kit.tables import GOSSIPS, PRESETS, SYNCHRONOUS_WIRES, covering, long_but

FEW = (*covering(SYNCHRONOUS_WIRES), GOSSIPS[0])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[bytes]]:
    """How often the body of each frame was read, by all peers of this process together."""
    found: Counter[bytes] = Counter()
    decode = body.decode_sections

    def counted(sections, data):
        found[bytes(data.obj)] += 1  # the frame: a result that one slice alone went into has the body of that slice
        return decode(sections, data)

    monkeypatch.setattr(body, "decode_sections", counted)
    return found


@pytest.mark.parametrize("preset", long_but(FEW, PRESETS))
@scene(peers=3)
async def test_no_frame_is_read_oftener_than_once_by_each_of_two_others(lab, reads, preset):
    if lab.manifest.exchange.kind == "pair":
        await lab.until(lambda: all(len(member.swaps) >= 4 for member in lab.members))
        reads.clear()
        await lab.until(lambda: all(len(member.swaps) >= 8 for member in lab.members))
        for member in lab.members:
            member.idle = True  # what they merge in the end is gathered, too
        await lab.until(lambda: all(member.node.driver.head.final for member in lab.members))
    else:
        await lab.rounds(1)
        reads.clear()
        await lab.rounds(3)
    assert reads
    assert max(reads.values()) <= 2


@pytest.mark.parametrize("preset", ["sparseloco", "streaming"])
@scene(peers=3)
async def test_nothing_stays_unpacked_of_a_round_that_is_over(lab, preset):
    await lab.rest()
    assert [member.node.replica.contents.unpacked.nbytes for member in lab.members] == [0, 0, 0]
    assert torch.isfinite(lab.members[0].node.replica.anchors[0]).all()
