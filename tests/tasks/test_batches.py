"""Batches of a run's text by peer and step, and what members draw of one data set, together and each on its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, IterableDataset

from decentral.errors import ConfigError, DataError
from decentral.tasks.batches import ShardPlace, ShardSampler, batch_at, batch_loader, seed_of, shard, window_start
from decentral.tasks.corpus import Shuffle

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


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("start", [0, 1, 7])
def test_the_loader_gives_the_batches_of_the_steps_from_any_start_and_draws_nothing(start: int, accelerated: bool):
    before, loader = torch.get_rng_state(), batch_loader(TRAIN, first_step=start, **ARGS)
    for step, batch in enumerate(first(Accelerator(cpu=True).prepare(loader) if accelerated else loader, 3), start):
        assert equal(batch, batch_at(TRAIN, step=step, **ARGS))
    assert accelerated or torch.equal(torch.get_rng_state(), before)


def test_windows_cover_the_corpus_evenly_to_both_ends():
    starts = torch.tensor([window_start(0, b"peer", row, 10) for row in range(5000)])
    counts = starts.bincount(minlength=10)
    assert counts.numel() == 10
    assert counts.min() > 400  # 500 expected, standard deviation 21


def test_a_corpus_shorter_than_a_window_is_one_line():
    with pytest.raises(DataError, match="one window needs 17"):
        batch_loader(TRAIN[:16], **ARGS)
    assert batch_at(TRAIN[:17], step=0, **ARGS)["input_ids"].shape == (4, 16)


# ---- shards ----

RUN = b"run" * 10
SHUFFLED = [117, 283, 81, 634, 801, 688]


class Member:
    """A peer that draws; its place is set from outside, as commits do."""

    def __init__(self, length: int, rank: int, count: int, steps: int = 0, batch_size: int = 4) -> None:
        self.place = ShardPlace(rank, count, steps)
        self.sampler = ShardSampler(length, batch_size, RUN, lambda: self.place)
        self.drawing: Iterator[int] = iter(())

    def draw(self, count: int) -> list[int]:
        """The next indices, over as many passes as it takes."""
        drawn: list[int] = []
        while len(drawn) < count:
            found = list(islice(self.drawing, count - len(drawn)))
            drawn += found
            if not found:
                self.drawing = iter(self.sampler)
        return drawn


@pytest.mark.parametrize("length", [1, 2, 3, 10, 97, 1000, 1024, 4097])
def test_a_shuffle_has_every_index_once(length):
    order = Shuffle(length, seed=5)
    assert sorted(order[place] for place in range(length)) == list(range(length))


def test_a_shuffle_is_the_same_everywhere_and_another_one_for_another_seed():
    assert [Shuffle(1000, 5)[place] for place in range(6)] == SHUFFLED
    assert [Shuffle(1000, 6)[place] for place in range(6)] != SHUFFLED


def test_a_shuffle_leaves_no_order_behind():
    order = torch.tensor([Shuffle(4096, 9)[place] for place in range(4096)], dtype=torch.float64)
    neighbours = torch.corrcoef(torch.stack([order[:-1], order[1:]]))[0, 1]
    places = torch.corrcoef(torch.stack([order, torch.arange(4096, dtype=torch.float64)]))[0, 1]
    assert abs(neighbours) < 0.06  # four standard errors
    assert abs(places) < 0.06


@pytest.mark.parametrize(("length", "count"), [(100, 4), (101, 4), (7, 3), (64, 1)])
def test_members_draw_every_index_of_a_pass_once_between_them(length, count):
    members = [Member(length, rank, count) for rank in range(count)]
    for _ in range(3):
        drawn = [index for member in members for index in member.sampler]
        assert sorted(drawn) == list(range(length))


def test_a_member_that_is_twice_as_fast_takes_nothing_of_the_others_in_the_pass():
    slow, fast = Member(1000, 0, 2), Member(1000, 1, 2)
    assert not set(fast.draw(400)) & set(slow.draw(200))


def test_a_member_of_more_than_there_are_items_goes_on_to_the_passes_that_have_one_for_it():
    assert len(Member(5, 7, 8).draw(3)) == 3


def test_the_next_pass_has_another_order():
    member = Member(1000, 0, 1)
    first, second = list(member.sampler), list(member.sampler)
    assert first != second
    assert sorted(first) == sorted(second)


def test_the_rest_of_a_pass_is_shared_out_anew_when_members_leave_and_nobody_draws_twice():
    """Three in step, a batch each per step: one leaves after 50 steps, and the two that stay finish the pass."""
    members = [Member(1200, rank, 3) for rank in range(3)]
    drawn = [index for member in members for index in member.draw(200)]
    for rank, member in enumerate(members[:2]):
        member.place = ShardPlace(rank, 2, steps=150)
    drawn += members[0].draw(300) + members[1].draw(300)
    assert sorted(drawn) == list(range(1200))


def test_a_newcomer_and_a_restarted_peer_begin_where_the_others_are():
    old = [Member(1200, rank, 2) for rank in range(2)]
    drawn = old[0].draw(300) + old[1].draw(300)
    members = [*old, Member(1200, 2, 3)]
    for rank, member in enumerate(members):
        member.place = ShardPlace(rank, 3, steps=150)
    members[0] = Member(1200, 0, 3, steps=150)
    for member in members:
        drawn += member.draw(200)
    assert sorted(drawn) == list(range(1200))


def test_who_was_further_than_the_commits_say_draws_nothing_of_its_own_again():
    member = Member(1000, 0, 2)
    before = member.draw(200)
    member.place = ShardPlace(1, 3, steps=10)
    assert not set(before) & set(member.draw(100))


def test_the_length_is_what_is_left_of_the_pass():
    member = Member(103, 1, 4)
    assert len(member.sampler) == 26
    member.draw(20)
    assert len(member.sampler) == 6
    assert len(list(islice(member.drawing, 100))) == 6


def test_a_loader_draws_batches_of_this_peers_part_only():
    data = torch.utils.data.TensorDataset(torch.arange(40))
    place = ShardPlace(1, 4)
    sampler = shard(data, 5, RUN, lambda: place)
    drawn = [batch for (batch,) in DataLoader(data, batch_size=5, sampler=sampler)]
    assert [len(batch) for batch in drawn] == [5, 5]
    assert torch.cat(drawn).tolist() == list(ShardSampler(40, 5, RUN, lambda: place))


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def test_what_can_only_be_walked_through_is_shared_item_by_item_and_follows_the_members():
    place = ShardPlace(1, 3)
    stream = shard(Counting(), 1, RUN, lambda: place)
    walk = iter(stream)
    assert [next(walk), next(walk)] == [1, 4]
    place = ShardPlace(0, 2)
    assert list(walk) == [6, 8, 10]
    assert list(shard((n for n in range(4)), 1, RUN, lambda: place)) == [0, 2]


def test_a_workers_copy_of_a_stream_knows_the_place_of_when_it_started():
    stream = shard(Counting(), 1, RUN, lambda: ShardPlace(2, 3))  # a lambda cannot be sent, as a peer cannot
    loader = DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert list(loader) == [2, 5, 8, 11]


def test_an_empty_data_set_is_refused():
    with pytest.raises(ConfigError, match="0 items by 4 per step"):
        shard([], 4, RUN, ShardPlace)


def test_seeds_follow_from_run_and_peer_and_fit_a_generator():
    seeds = {seed_of(run, peer) for run in (b"a", b"b") for peer in (b"p", b"q")}
    assert len(seeds) == 4
    for seed in seeds:
        torch.Generator().manual_seed(seed)
        assert 0 < seed < 2**63
