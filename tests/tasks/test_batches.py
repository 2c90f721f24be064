import itertools

import pytest
import torch
from accelerate import Accelerator

from decentral.errors import DataError
from decentral.tasks.batches import batch_at, batch_loader, window_start

GOLDEN = [435, 877, 683, 632]
TRAIN = (torch.arange(10_000) * 7 % 256).to(torch.uint8)
ARGS = {"seed": 3, "peer": b"p" * 32, "batch_size": 4, "context": 16}


def first(loader, count):
    return list(itertools.islice(loader, count))


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_a_batch_is_a_function_of_seed_peer_and_step():
    batch = batch_at(TRAIN, step=5, **ARGS)
    assert batch["input_ids"].shape == (4, 16)
    assert batch["input_ids"].dtype == torch.int64
    assert equal(batch, batch_at(TRAIN, step=5, **ARGS))
    for other in ({"step": 6}, {"step": 5, "seed": 4}, {"step": 5, "peer": b"q" * 32}):
        assert not equal(batch, batch_at(TRAIN, **{**ARGS, **other}))


def test_golden_windows_so_that_versions_agree():
    assert [window_start(0, b"\0" * 32, row, 1000) for row in range(4)] == GOLDEN
    assert window_start(-1, b"", 2**40, 1) == 0


def test_the_loader_gives_the_batches_of_the_steps_from_any_start():
    for start in (0, 1, 7):
        loader = batch_loader(TRAIN, first_step=start, **ARGS)
        for step, batch in enumerate(first(loader, 3), start):
            assert equal(batch, batch_at(TRAIN, step=step, **ARGS))


def test_an_accelerated_loader_gives_the_same_batches():
    loader = Accelerator(cpu=True).prepare(batch_loader(TRAIN, first_step=2, **ARGS))
    for step, batch in enumerate(first(loader, 3), 2):
        assert equal(batch, batch_at(TRAIN, step=step, **ARGS))


def test_loading_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    first(batch_loader(TRAIN, **ARGS), 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_windows_cover_the_corpus_evenly_to_both_ends():
    starts = torch.tensor([window_start(0, b"peer", row, 10) for row in range(5000)])
    counts = starts.bincount(minlength=10)
    assert counts.numel() == 10
    assert counts.min() > 400  # 500 expected, standard deviation 21


def test_a_corpus_shorter_than_a_window_is_one_line():
    with pytest.raises(DataError, match="one window needs 17"):
        batch_loader(TRAIN[:16], **ARGS)
    assert batch_at(TRAIN[:17], step=0, **ARGS)["input_ids"].shape == (4, 16)
