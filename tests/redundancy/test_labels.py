"""Pieces of a state: any few give it back to the bit, to its owner alone, and no altered or foreign one opens."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from decentral.errors import PayloadError
from decentral.redundancy.giver import pack_state, unpack_state
from decentral.redundancy.pieces import CHUNK_NBYTES, LABEL_NBYTES, MOST_STRIPES, SEAL_NBYTES, Label, Seals
from decentral.wire.keys import Signer

OWNER, RUN, SALT = Signer(bytes([1] * 32)), bytes([0xAA] * 32), bytes(range(16))
SEALS = Seals(OWNER, RUN)
SMALL = np.random.default_rng(0).bytes(1000)


def cut(state: bytes, pieces: int = 3, needed: int = 2, round_: int = 7) -> tuple[Label, list[list[bytes]]]:
    """The chunks of every stripe, one for each piece."""
    plan = Label(round_, SALT, 0, pieces, needed, len(state))
    return plan, [SEALS.chunks(plan, stripe, memoryview(state)) for stripe in range(plan.stripes)]


def joined(plan: Label, stripes: list[list[bytes]], numbers: tuple[int, ...]) -> bytes:
    whole = b""
    for stripe, chunks in enumerate(stripes):
        opened = {number: SEALS.open_chunk(SEALS.label(plan, number), stripe, chunks[number]) for number in numbers}
        whole += bytes(SEALS.stripe(plan, opened))
    return whole[: plan.state_nbytes]


@pytest.mark.parametrize("nbytes", [1, 8, 1000, 2 * CHUNK_NBYTES, 2 * CHUNK_NBYTES + 1, 5 * CHUNK_NBYTES - 3])
def test_any_two_of_three_pieces_give_the_state_back(nbytes: int) -> None:
    state = np.random.default_rng(nbytes).bytes(nbytes)
    plan, stripes = cut(state)
    assert sum(len(chunks[0]) for chunks in stripes) == plan.piece_nbytes
    for numbers in combinations(range(3), 2):
        assert joined(plan, stripes, numbers) == state


def test_a_piece_is_as_long_as_its_part_of_the_state_and_little_more() -> None:
    for nbytes in (1, 999, 10**6, 10**9 + 1):
        plan = Label(0, SALT, 0, 5, 3, nbytes)
        assert nbytes / 3 <= plan.piece_nbytes <= nbytes / 3 + plan.stripes * (SEAL_NBYTES + 8)
        assert plan.chunk_nbytes <= CHUNK_NBYTES


def test_no_single_changed_bit_of_a_chunk_opens() -> None:
    plan, ((chunk, *_),) = cut(SMALL[:32])
    label = SEALS.label(plan, 0)
    for bit in range(8 * len(chunk)):
        altered = bytearray(chunk)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError, match="not what was given to keep"):
            SEALS.open_chunk(label, 0, bytes(altered))


def test_a_chunk_of_another_place_piece_state_run_or_owner_does_not_open() -> None:
    plan, stripes = cut(np.random.default_rng(1).bytes(3 * CHUNK_NBYTES))
    chunk, label = stripes[0][1], SEALS.label(plan, 1)
    assert SEALS.open_chunk(label, 0, chunk)
    older = replace(plan, round=6)
    for seals, other, stripe in (
        (SEALS, label, 1),
        (SEALS, SEALS.label(plan, 0), 0),
        (SEALS, SEALS.label(older, 1), 0),
        (SEALS, SEALS.label(replace(plan, salt=bytes(16)), 1), 0),
        (Seals(OWNER, bytes(32)), label, 0),
        (Seals(Signer(bytes([2] * 32)), RUN), label, 0),
    ):
        with pytest.raises(PayloadError):
            seals.open_chunk(other, stripe, chunk)


def test_only_the_owner_can_write_a_label() -> None:
    plan, _ = cut(SMALL)
    label = SEALS.label(plan, 2)
    assert SEALS.is_ours(Label.read(label.to_bytes()))
    assert not SEALS.is_ours(replace(label, round=8))
    assert not SEALS.is_ours(replace(label, state_nbytes=10**12))
    assert not SEALS.is_ours(Seals(Signer(bytes([2] * 32)), RUN).label(plan, 2))


def test_what_a_keeper_has_shows_nothing_of_the_state() -> None:
    """Its chunks look the same to gzip and to the eye whatever the state is; equal states are other bytes each time."""
    plan, ((first, *_),) = cut(bytes(1000))
    other = replace(plan, salt=bytes(16))
    again = SEALS.chunks(other, 0, memoryview(bytes(1000)))[0]
    assert first != again
    assert len(set(first)) > 150, "zeros do not show"


def test_the_bytes_of_labels_and_chunks_stay_as_they_are() -> None:
    """What an owner of one version gave, it reads with another."""
    plan, (chunks,) = cut(bytes(range(16)))
    assert SEALS.label(plan, 2).to_bytes().hex() == LABEL
    assert [chunk.hex() for chunk in chunks] == CHUNKS


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"number": 3}, "piece 3 of 3"),
        ({"needed": 0}, "0 needed"),
        ({"needed": 4}, "4 needed"),
        ({"pieces": 33}, "of 33"),
        ({"state_nbytes": 0}, "state of 0 bytes"),
        ({"state_nbytes": 2**64 - 1}, "state of 18446744073709551615 bytes"),
        ({"state_nbytes": 2 * MOST_STRIPES * CHUNK_NBYTES + 1}, "state of"),
    ],
)
def test_labels_that_nobody_would_write_are_refused(changed: dict[str, int], words: str) -> None:
    plan, _ = cut(SMALL)
    with pytest.raises(PayloadError, match=words):
        Label.read(replace(plan, **changed).to_bytes())


def test_a_label_of_another_length_is_refused() -> None:
    for nbytes in (0, LABEL_NBYTES - 1, LABEL_NBYTES + 1):
        with pytest.raises(PayloadError, match=f"label of {nbytes} bytes"):
            Label.read(bytes(nbytes))


def test_tensors_of_every_kind_come_back_to_the_bit() -> None:
    tensors = {
        "moment": torch.randn(5, 3),
        "transposed": torch.randn(4, 3).T,
        "half": torch.randn(3).bfloat16(),
        "step": torch.tensor(7.0),
        "random": torch.get_rng_state(),
        "none": torch.empty(0, 2),
    }
    found, document = unpack_state(pack_state(tensors, {"steps": [1, 2.5, None, "ü"]}))
    assert document == {"steps": [1, 2.5, None, "ü"]}
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )


@pytest.mark.parametrize("data", [b"", bytes(7), b"\xff" * 64, (2).to_bytes(8, "little") + b"{}" + bytes(9)])
def test_bytes_of_another_version_are_refused(data: bytes) -> None:
    with pytest.raises(PayloadError, match="another version"):
        unpack_state(data)


LABEL = "0700000000000000000102030405060708090a0b0c0d0e0f0203021000000000000000cb9b981b4cf61c4eab0d426940c7c0a8"
CHUNKS = [
    "24a93ab8bf7df26c657139a4a588890174b94f6a8b42c32a",
    "7728a0da4f7a32d0cd624b98aa5f2e00025a4fa3d60179fd",
    "0cee34d13ed0dcfa84b8ad045211a131539daaf4ba90f2bb",
]
