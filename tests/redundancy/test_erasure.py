"""Reed-Solomon pieces: any K of n give the rows back, K - 1 never do, and the bytes never change."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from decentral.redundancy.pieces import FIELD_SIZE, join_pieces, pieces_of


def rows(needed: int, nbytes: int = 64, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (needed, nbytes), dtype=np.uint8)


@pytest.mark.parametrize(("needed", "count"), [(1, 1), (1, 4), (2, 3), (3, 5), (4, 8), (5, 5)])
def test_any_k_of_n_pieces_give_the_rows_back(needed: int, count: int) -> None:
    row_KW = rows(needed)
    piece_nW = pieces_of(row_KW, count)
    for chosen in combinations(range(count), needed):
        assert np.array_equal(join_pieces({number: piece_nW[number] for number in chosen}, needed), row_KW), chosen


def test_as_many_pieces_as_the_field_has_elements_can_be_made_and_joined() -> None:
    row_KW = rows(40, 8)
    piece_nW = pieces_of(row_KW, FIELD_SIZE)
    last = {number: piece_nW[number] for number in range(FIELD_SIZE - 40, FIELD_SIZE)}
    assert np.array_equal(join_pieces(last, 40), row_KW)


def test_one_piece_less_fits_other_rows_as_well() -> None:
    """What K - 1 pieces say of the rows leaves room for all values of one of them: two sets of rows share them."""
    row_KW, other_KW = rows(3), rows(3, seed=1)
    piece_nW = pieces_of(row_KW, 5)
    kept = {0: piece_nW[0], 3: piece_nW[3]}
    forged = join_pieces({**kept, 4: pieces_of(other_KW, 5)[4]}, 3)
    assert not np.array_equal(forged, row_KW)
    again_nW = pieces_of(forged, 5)
    assert all(np.array_equal(again_nW[number], piece_W) for number, piece_W in kept.items())
    with pytest.raises(AssertionError, match="2 of 3 pieces"):
        join_pieces(kept, 3)


def test_an_altered_piece_gives_other_rows() -> None:
    row_KW = rows(2)
    piece_nW = pieces_of(row_KW, 3)
    piece_nW[2, 5] ^= 1
    assert not np.array_equal(join_pieces({0: piece_nW[0], 2: piece_nW[2]}, 2), row_KW)


def test_the_bytes_of_pieces_stay_as_they_are() -> None:
    """Peers of another version must be able to join them."""
    row_KW = np.arange(24, dtype=np.uint8).reshape(3, 8) * 11
    assert [bytes(piece).hex() for piece in pieces_of(row_KW, 5)[3:]] == GOLDEN


GOLDEN = ["9cf6087c71c8811a", "826ee559051e9b25"]
