"""Buffers behind a frame's body: which frames carry them, what is refused, what becomes of those of several peers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decentral.compressors import parse_compressor
from decentral.errors import NonFiniteError, PayloadError
from decentral.parameters import BufferSpec
from decentral.replica.codec import Codec, range_shapes
from decentral.replica.contents import NO_TAIL, Tail, carriers
from decentral.rounds.frame_io import Inbox
from decentral.wire.frames import HEADER_NBYTES, Frame, FrameKind, parse, seal
from decentral.wire.keys import Signer
from decentral.wire.messages import FrameRef, Record
from tests.fuzz.targets import HEAD, SCHEMA, SHAPES, SIGNERS, THE_PLAN
from tests.kit.builders import header

BUFFERS = (BufferSpec("norm.running_mean", (3,), "float"), BufferSpec("norm.num_batches_tracked", (), "integer"))
WHOLE = replace(SCHEMA, buffers=BUFFERS)
TAIL = Tail.of(WHOLE, "average")
CODEC = Codec(parse_compressor("none"))
VALUES = torch.tensor([0.5, -1.0, 1e30, 7.0])


def inbox(tail: Tail = TAIL) -> Inbox:
    made = Inbox(WHOLE, CODEC, CODEC, tail=tail, channels=2)
    made.expect(THE_PLAN)
    return made


def sealed(tail: bytes, **fields: object) -> Frame:
    made = header(**fields)
    shapes = SHAPES[made.fragment]
    if made.kind in (FrameKind.SLICE, FrameKind.RESULT):
        _, start, stop = THE_PLAN.partition[made.part]
        shapes = range_shapes(start, stop)
    shapes = tuple(shapes) * made.channels
    numel = sum(torch.zeros(shape).numel() for shape in shapes)
    signer = next(one for one in SIGNERS if one.peer == made.sender)
    return seal(made, CODEC.encode(torch.ones(numel), {}, shapes).body, signer, tail)


PLANNED = {"parts": len(THE_PLAN.partition), "plan": THE_PLAN.number}


@pytest.mark.parametrize(
    ("fields", "carries"),
    [
        ({"kind": FrameKind.CONTRIBUTION}, True),
        ({"kind": FrameKind.MERGE}, True),
        ({"kind": FrameKind.SWAP, "states": 1}, True),
        ({"kind": FrameKind.SLICE, "part": 0, **PLANNED}, True),
        ({"kind": FrameKind.RESULT, "part": 0, **PLANNED}, True),
        ({"kind": FrameKind.SLICE, "part": 1, **PLANNED}, True),
        ({"kind": FrameKind.RESULT, "part": 1, "sender": SIGNERS[1].peer, **PLANNED}, True),
        ({"kind": FrameKind.CONTRIBUTION, "fragment": 1}, False),
    ],
    ids=str,
)
def test_what_there_is_of_fragment_0_carries_the_buffers_and_nothing_else_does(fields, carries):
    with_tail, without = sealed(TAIL.pack(VALUES), **fields), sealed(b"", **fields)
    good, bad = (with_tail, without) if carries else (without, with_tail)
    made = inbox()
    frame, decoded = made.check(good.data, HEAD)
    if decoded is None:  # gathered: its parts are kept instead
        decoded = CODEC.decompress(made.unpacked.get(frame))
    told = TAIL.split(frame)[1]
    assert bool((decoded == 1).all())
    assert torch.equal(told, VALUES) if carries else told is None
    with pytest.raises(PayloadError):
        inbox().check(bad.data, HEAD)


def test_a_peer_that_keeps_its_own_sends_and_takes_no_tail():
    own = Tail.of(WHOLE, "own")
    assert own == NO_TAIL
    assert own.pack(VALUES) == b""
    inbox(own).check(sealed(b"").data, HEAD)
    with pytest.raises(PayloadError):
        inbox(own).check(sealed(TAIL.pack(VALUES)).data, HEAD)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_buffers_that_are_not_finite_are_neither_sent_nor_taken(bad):
    values = torch.tensor([0.0, 0.0, bad, 0.0])
    with pytest.raises(NonFiniteError, match=r"NaN or Inf in the buffer norm\.running_mean"):
        TAIL.pack(values)
    with pytest.raises(PayloadError, match="buffers with NaN"):
        inbox().check(sealed(values.numpy().tobytes()).data, HEAD)


@given(st.binary(max_size=700))
def test_any_other_body_is_a_payload_error(body):
    frame = seal(header(), body, SIGNERS[0])
    with pytest.raises(PayloadError):
        inbox().check(frame.data, HEAD)


def test_the_tail_is_counted_by_whoever_bounds_a_frame():
    made = inbox()
    assert made.limit() == inbox(NO_TAIL).limit() + 16
    assert made.max_nbytes(header(), HEAD) == inbox(NO_TAIL).max_nbytes(header(), HEAD) + 16
    assert made.max_nbytes(header(fragment=1), HEAD) == inbox(NO_TAIL).max_nbytes(header(fragment=1), HEAD)


def test_a_body_with_a_tail_is_hashed_and_signed_as_one():
    frame = sealed(TAIL.pack(VALUES))
    assert parse(frame.data, lambda _: len(frame.body)).hash == frame.hash
    forged = bytearray(frame.data)
    forged[-1] ^= 1
    with pytest.raises(PayloadError, match="hash"):
        parse(bytes(forged), lambda _: len(forged) - HEADER_NBYTES)


def test_the_mean_counts_all_alike_is_finite_and_rounds_whole_numbers():
    big = torch.finfo(torch.float32).max
    told = [torch.tensor([1.0, big, 0.0, 7.0]), torch.tensor([2.0, big, 0.0, 8.0]), torch.tensor([6.0, big, 0.0, 8.0])]
    assert TAIL.merge(told).tolist() == [3.0, big, 0.0, 8.0]
    assert torch.equal(TAIL.merge(told[:1]), told[0])


def test_of_two_the_first_contributors_buffers_are_taken_as_they_are():
    first = Tail.of(WHOLE, "first")
    assert torch.equal(first.merge([VALUES, torch.zeros(4)]), VALUES)


POINTERS = (BufferSpec("queue", (2,), "float"), BufferSpec("pointer", (2,), "integer"))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_of_whole_numbers_that_count_nothing_the_lower_median_is_taken_and_no_mean(count):
    tail = Tail.of(replace(SCHEMA, buffers=POINTERS), "average")
    told = [torch.tensor([1.0 + n, 0.0, 8.0 * n, 64.0 - 8 * n]) for n in range(count)]
    middle = (count - 1) // 2
    assert tail.merge(told)[2:].tolist() == [8.0 * middle, 64.0 - 8 * (count - 1 - middle)]
    assert float(tail.merge(told)[0]) == pytest.approx(1.0 + (count - 1) / 2)


def test_the_first_contributors_whole_numbers_are_taken_or_somebodys_where_it_is_far_from_the_others():
    tail = Tail.of(replace(SCHEMA, buffers=POINTERS), "first")
    told = [torch.tensor([1.0, 0.0, pointer, 16.0]) for pointer in (24.0, 8.0, 32.0, 16.0)]
    assert tail.merge(told)[2:].tolist() == [24.0, 16.0]
    told[0][2] = 1e9
    assert tail.merge(told)[2:].tolist() == [16.0, 16.0]


# ---- buffers that are far from the others' ----

MANY = 20_000


def tail_of(numel: int, policy: str = "average") -> Tail:
    return Tail.of(replace(SCHEMA, buffers=(BufferSpec("norm.running_mean", (numel,), "float"),)), policy)


def drawn(kind: str, count: int, numel: int) -> np.ndarray:
    """Honest values (K, B) around zero."""
    generator = np.random.default_rng(count)
    heavy = {"gaussian": generator.standard_normal, "laplace": lambda size: generator.laplace(size=size)}
    return heavy.get(kind, lambda size: generator.standard_t(3, size))((count, numel)).astype(np.float32)


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "student"])
@pytest.mark.parametrize("count", [3, 4, 5, 6, 8, 16, 64])
def test_shortening_costs_honest_peers_two_percent_of_the_means_error_at_most(kind, count):
    value_KB = drawn(kind, count, MANY)
    merged_B = tail_of(MANY).merge([torch.from_numpy(value_B) for value_B in value_KB]).numpy()
    error, of_the_mean = (
        np.sqrt(np.square(made_B, dtype=np.float64).mean()) for made_B in (merged_B, value_KB.mean(0))
    )
    assert error <= 1.02 * of_the_mean
    if kind != "gaussian":
        assert error < of_the_mean


@pytest.mark.parametrize("lie", [1e30, -3e38, 50.0])
@pytest.mark.parametrize(("count", "spreads"), [(3, 6.0), (4, 1.5), (5, 2.0), (9, 1.0), (64, 0.1)])
def test_what_one_says_moves_the_mean_by_no_more_than_the_others_differ(lie, count, spreads):
    told_KB = drawn("gaussian", count, 2000)
    honest_KB = told_KB[1:].astype(np.float64)
    told_KB[0] = lie
    merged_B = tail_of(2000).merge([torch.from_numpy(value_B) for value_B in told_KB]).numpy()
    moved_B = np.abs(merged_B - honest_KB.mean(0))
    floor = 1e-3 * np.abs(honest_KB).max(0) + 1e-5
    assert (moved_B <= spreads * (honest_KB.max(0) - honest_KB.min(0)) + floor).all()


def test_values_that_agree_but_for_rounding_are_averaged_as_they_are():
    told = [torch.tensor([1.0, 0.0, 100.0]) + n * 1e-7 for n in (0, 0, 0, 0, 1)]
    mean_B = torch.stack(told).double().mean(0).float()
    assert torch.equal(tail_of(3).merge(told), mean_B)


def test_the_first_contributors_buffers_are_shortened_to_where_the_others_have_them():
    told = [torch.tensor([1e30]), *(torch.tensor([value]) for value in (1.0, 1.1, 0.9, 1.05))]
    assert 1.0 < float(tail_of(1, "first").merge(told)) < 2.5
    assert float(tail_of(1, "first").merge(told[1:])) == 1.0


def frames_of(tails: list[torch.Tensor], kind: FrameKind, partition: tuple = ()) -> tuple[Record, dict]:
    """A record of a swarm of five that names one frame of each signer, and the frames."""
    signers = sorted((Signer(bytes([n + 1] * 32)) for n in range(len(tails))), key=lambda signer: signer.peer)
    of = tail_of(len(tails[0]))
    frames = [
        seal(header(kind=kind, sender=one.peer, part=n if partition else 0, parts=len(partition) or 1), b"", one,
             of.pack(tail_B))
        for n, (one, tail_B) in enumerate(zip(signers, tails, strict=True))
    ]  # fmt: skip
    refs = tuple(FrameRef(frame.header.sender, frame.hash, frame.header.part, 1, 1) for frame in frames)
    peers = tuple(signer.peer for signer in signers)
    cut = tuple((peer, n, n + 1) for n, peer in enumerate(peers)) if partition else ()
    record = Record(
        bytes(32), 0, 1, 0, 0, 0, bytes(32), bytes(32), peers, refs, refs if partition else (), cut, peers, False
    )
    return record, {frame.hash: frame for frame in frames}


def test_frames_give_the_same_bits_in_whatever_order_a_record_names_them():
    tails = list(torch.from_numpy(drawn("student", 5, 500)))
    record, frames = frames_of(tails, FrameKind.CONTRIBUTION)
    made_B = tail_of(500).read_record(record, frames, torch.zeros(500))[1]
    for turn in range(1, 5):
        turned = replace(record, frames=(*record.frames[turn:], *record.frames[:turn]))
        assert torch.equal(tail_of(500).read_record(turned, frames, torch.zeros(500))[1], made_B)


@pytest.mark.parametrize(("owners", "liars"), [(3, 1), (4, 1), (5, 2)])
def test_owners_of_a_reduce_who_lie_change_nothing_while_most_tell_the_truth(owners, liars):
    honest_B = torch.from_numpy(drawn("gaussian", 1, 50)[0])
    lies = [torch.full((50,), lie) for lie in (1e30, -1e30)[:liars]]
    for tails in ([*lies, *[honest_B] * (owners - liars)], [*[honest_B] * (owners - liars), *lies]):
        record, frames = frames_of(tails, FrameKind.RESULT, tuple(range(owners)))
        assert torch.equal(tail_of(50).read_record(record, frames, torch.zeros(50))[1], honest_B)


def test_of_two_owners_that_differ_what_is_nearer_to_the_buffers_before_counts():
    honest_B, before_B = torch.tensor([1.0, 2.0, -3.0]), torch.tensor([0.9, 2.5, -3.0])
    for lie in (1e30, -1e30):
        for tails in ([honest_B, torch.full((3,), lie)], [torch.full((3,), lie), honest_B]):
            record, frames = frames_of(tails, FrameKind.RESULT, (0, 1))
            assert torch.equal(tail_of(3).read_record(record, frames, before_B)[1], honest_B)


def test_an_owner_of_several_parts_has_one_say():
    honest_B, lie_B = torch.ones(3), torch.full((3,), 1e30)
    record, frames = frames_of([lie_B, lie_B, honest_B, honest_B], FrameKind.RESULT, (0, 1, 2, 3))
    first, second, *others = record.frames
    liars = (first, replace(second, peer=first.peer))
    again = replace(record, frames=(*liars, *others))
    assert torch.equal(tail_of(3).read_record(again, frames, torch.zeros(3))[1], honest_B)


@pytest.mark.parametrize(("parts", "wanted"), [(1, {0}), (2, {0, 1}), (5, {0, 1, 2, 3, 4}), (20, {0, 4, 8, 12, 16})])
def test_parts_that_carry_buffers_are_few_and_spread_over_the_owners(parts, wanted):
    assert carriers(parts) == wanted
    assert [part for part in range(parts) if TAIL.nbytes(0, part, parts)] == sorted(wanted)
