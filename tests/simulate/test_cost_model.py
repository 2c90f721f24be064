"""The arithmetic of round_cost and of decentral.simulate.cost against what real peers send."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch

from decentral.compressors import parse_compressor
from decentral.dissemination.broadcast import PUSH
from decentral.optimizers import make_outer
from decentral.replica.codec import Codec
from decentral.simulate import cost
from decentral.training import round_cost
from decentral.training.round_cost import Cost
from decentral.transport.memory import MemoryTransport

KINDS = {"sparseloco": "gather", "diloco": "reduce", "noloco": "pair", "gasloc": "pair"}
PARTS = {"frame": "frames", "pair": "frames", "control": "control", "lease": "directory", "leases": "directory"}


class Counted:
    """A stream that books what both of its ends send."""

    def __init__(self, stream, part, tally, is_push):
        self.stream, self.part, self.tally, self.is_push = stream, part, tally, is_push
        self.peer = stream.peer

    async def send(self, data):
        await self.stream.send(data)
        self.tally[self.part, "nbytes"] += len(data)

    async def receive_exactly(self, nbytes, on_bytes=None):
        data = await self.stream.receive_exactly(nbytes, on_bytes)
        self.tally[self.part, "nbytes"] += nbytes
        if not self.is_push:  # that it was handled is no message of the model: it is sent, heard or not
            self.tally[self.part, "messages"] += nbytes == 4  # a length: an answer begins
        return data

    async def aclose(self):
        await self.stream.aclose()


@pytest.fixture
def tally(monkeypatch) -> Counter:
    counts: Counter = Counter()
    plain = MemoryTransport.open

    async def opened(self, peer, protocol):
        stream = await plain(self, peer, protocol)
        part = PARTS[protocol.split("/")[2]]
        counts[part, "messages"] += 1
        return Counted(stream, part, counts, protocol == PUSH)

    async def joining(self, peer, protocol):
        return await (opened if protocol.split("/")[2] in PARTS else plain)(self, peer, protocol)

    monkeypatch.setattr(MemoryTransport, "open", joining)
    return counts


def body_of(manifest, schema, doubled):
    """Bytes of a frame's body by its number of values, from the run's own codec."""
    codec, shapes = Codec(parse_compressor(manifest.compressor.chain)), schema.fragments[0].shapes

    @cache
    def nbytes(numel: int) -> int:
        whole = numel == schema.fragments[0].numel and manifest.exchange.kind == "gather"
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * (0.1 if doubled else 1.0)
        return len(codec.encode(values, {}, shapes if whole else ((numel,),)).body)

    return nbytes


def quiet(lab, kind):
    """Nobody is in the middle of a round."""
    if kind == "pair":
        return len({len(m.swaps) for m in lab.members}) == 1 and all(not m.node.gossip.is_swapping for m in lab.members)
    drivers = [m.node.driver for m in lab.members]
    return len({d.head.round for d in drivers}) == 1 and not any(d.machine.state.round.offers for d in drivers)


@pytest.mark.parametrize(
    ("preset", "n"),
    [
        ("sparseloco", 3),
        ("diloco", 3),
        ("noloco", 5),
        ("gasloc", 5),
        pytest.param("sparseloco", 5, marks=pytest.mark.long),
        pytest.param("sparseloco", 8, marks=pytest.mark.long),
        pytest.param("diloco", 8, marks=pytest.mark.long),
        pytest.param("noloco", 8, marks=pytest.mark.long),
    ],
)
def test_the_model_gives_the_messages_and_bytes_that_real_peers_send(run_lab, terms, tally, preset, n):
    kind, manifest = KINDS[preset], terms(preset, lease=9.0, shrink_after=60.0)

    async def script(lab):
        def stand():
            rounds = lab.members[0].node.driver.head.round
            steps = sum(len(m.swaps) for m in lab.members) / n
            sequences = sum(m.node.directory.own.seal().sequence for m in lab.members) / n
            sent = sum(m.transport.traffic.total.sent for m in lab.members) / n
            return rounds + steps, sequences, sent

        for _ in range(n):
            lab.add()
        await lab.all_members()
        await lab.until(lambda: all(m.rounds + len(m.swaps) >= 2 for m in lab.members) and quiet(lab, kind))
        tally.clear()
        before = stand()
        goal = before[0] + 3
        await lab.until(lambda: stand()[0] >= goal and quiet(lab, kind))
        rounds, renewals, sent = (after - then for after, then in zip(stand(), before, strict=True))

        numel, lease = lab.schema.fragments[0].numel, lab.members[0].node.directory.own.seal()
        body = body_of(manifest, lab.schema, kind == "pair")
        vectors = {"vectors": len(make_outer(preset, {}).channels())} if kind == "pair" else {}
        predicted = {
            "frames": getattr(round_cost, kind)(n, numel, body, **vectors).times(rounds),
            "control": Cost(0, 0) if kind == "pair" else round_cost.control(kind, n, numel).times(rounds),
            "directory": cost.renewal(n, lease).times(renewals),
        }
        for part, expected in predicted.items():
            assert tally[part, "nbytes"] / n == pytest.approx(expected.nbytes, rel=0.05), part
            assert tally[part, "messages"] / n == pytest.approx(expected.messages, rel=0.05), part
        assert sent == pytest.approx(sum(part.nbytes for part in predicted.values()), rel=0.05)

    run_lab(manifest, script)
