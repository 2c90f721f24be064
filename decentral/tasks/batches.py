"""The data that a peer trains on: bytes at a step, or its part of any data set.

The bytes are a pure function of (seed, peer, row), so any step can be resumed. Counter-based: row ``i`` (= step *
batch_size + position in the batch) starts where blake2b of (seed, peer, i) says. No generator to save, no peer's data
depends on another's, and two peers never walk the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from decentral.errors import ConfigError, DataError
from decentral.tasks.corpus import Shuffle

Row = dict[str, Tensor]  # input_ids and labels, int64 (context,); the model shifts the labels by one itself


def window_start(seed: int, peer: bytes, row: int, num_starts: int) -> int:
    """Return the first byte of this peer's ``row``-th window, uniform in [0, num_starts)."""
    counter = seed.to_bytes(8, "little", signed=True) + row.to_bytes(8, "little")
    hashed = blake2b(counter + peer, digest_size=16, person=b"decentral-batch").digest()
    return int.from_bytes(hashed, "little") % num_starts  # 128 bits: the bias of % is below 2**-64


def batch_at(train: Tensor, *, seed: int, peer: bytes, step: int, batch_size: int, context: int) -> dict[str, Tensor]:
    """Return the batch of one inner step: ``input_ids`` and ``labels``, int64 (batch_size, context).

    Args:
        train: uint8 (N,), N > context.
        seed: the run's seed, signed 64 bits.
        peer: the peer's public key; any bytes.
        step: inner step, from 0.
        batch_size: windows per step.
        context: bytes per window.

    """
    rows = RowStream(train, seed=seed, peer=peer, context=context, start=step * batch_size)
    return {
        name: torch.stack([rows[rows.start + position][name] for position in range(batch_size)])
        for name in ("input_ids", "labels")
    }


class RowStream(IterableDataset[Row]):
    """Endless rows from ``start`` on. Start again with ``start = rows already used`` to resume."""

    def __init__(self, train: Tensor, *, seed: int, peer: bytes, context: int, start: int = 0) -> None:
        if train.numel() <= context:
            raise DataError(
                f"the corpus has {train.numel()} bytes to train on, one window needs {context + 1}; "
                "name more text with --data or lower the context"
            )
        self.train, self.seed, self.peer, self.context, self.start = train, seed, peer, context, start

    def __getitem__(self, row: int) -> Row:
        """Return row ``row`` of this peer, whatever was read before."""
        begin = window_start(self.seed, self.peer, row, self.train.numel() - self.context)
        window = self.train[begin : begin + self.context].long()
        return {"input_ids": window, "labels": window}

    def __iter__(self) -> Iterator[Row]:
        row = self.start
        while True:
            yield self[row]
            row += 1


def batch_loader(
    train: Tensor, *, seed: int, peer: bytes, batch_size: int, context: int, first_step: int = 0
) -> DataLoader[Row]:
    """Return endless batches from inner step ``first_step`` on, ready for ``accelerator.prepare``.

    With several processes per peer each inner step takes ``num_processes`` batches: resume with
    ``first_step = inner steps done * num_processes``.
    """
    rows = RowStream(train, seed=seed, peer=peer, context=context, start=first_step * batch_size)
    # A generator of its own: the loader draws a base seed from the global one otherwise.
    return DataLoader(rows, batch_size=batch_size, generator=torch.Generator().manual_seed(0))


# ---- a part of a data set ----
#
# Disjoint from the other members', shared out anew when they change.
#
# All peers walk one endless row of places: one pass over the data set in shuffled order, the next in another, and so
# on. The member of rank r among n takes the places that leave r when divided by n. While the membership stays as it is,
# nobody takes what another member took: no index is drawn twice in a pass, and every index of a pass is drawn once all
# members have been through it. When the membership changes, each goes on with its new remainder at the place that the
# committed rounds have reached, or where it was if that is further: what members had drawn beyond it may be drawn
# again, and what a slower one had not reached is left out of this pass. No message is sent, and nobody waits.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Where a peer stands among the members of a run; it changes at step boundaries, alike on all its processes."""

    rank: int = 0  # among ``count``
    count: int = 1  # members, this peer included
    steps: int = 0  # inner steps of all peers together behind the membership's beginning, as commits tell them


def seed_of(run: bytes, who: bytes) -> int:
    """Return 63 bits that follow from a run's digest and a name."""
    hashed = blake2b(run + who, digest_size=8, person=b"decentral-seed").digest()
    return int.from_bytes(hashed, "little") >> 1


class Indexed(Protocol):
    """A data set with a length and indices."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


def shard(
    dataset: Indexed | Dataset[T] | Iterable[T], batch_size: int, run: bytes, place: Callable[[], ShardPlace]
) -> ShardSampler | ShardedStream[T]:
    """Return a ShardSampler, or a ShardedStream of what has no indices. ConfigError for an empty data set or batch."""
    if is_stream(dataset):
        return ShardedStream(cast("Iterable[T]", dataset), place)
    if not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"shard: a {type(dataset).__name__} has indices and no len; give it one, or pass an IterableDataset"
        )
    length = len(cast(Indexed, dataset))
    if not length or batch_size < 1:
        raise ConfigError(f"shard: {length} items by {batch_size} per step; there must be one of each at least")
    return ShardSampler(length, batch_size, run, place)


def is_stream(dataset: object) -> bool:
    """Tell whether it can only be walked through. ConfigError for what is no data."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        if not hasattr(dataset, "__iter__"):
            raise ConfigError(
                f"shard: a {type(dataset).__name__} has neither indices nor an end; pass the data set itself"
            )
        return True
    return False


class ShardSampler(Sampler[int]):
    """Indices of this peer's part: each iteration is what is left of a pass."""

    def __init__(self, length: int, batch_size: int, run: bytes, place: Callable[[], ShardPlace]) -> None:
        self._length, self._batch_size, self._run, self._place = length, batch_size, run, place
        self._known: ShardPlace | None = None
        self._next = 0  # the place to be drawn next

    def __iter__(self) -> Iterator[int]:
        self._follow()
        pass_ = self._next // self._length
        order = Shuffle(self._length, seed_of(self._run, pass_.to_bytes(8, "little")))
        while self._next // self._length == pass_:
            drawn, self._next = self._next, self._next + self._count
            yield order[drawn % self._length]
            self._follow()

    def __len__(self) -> int:
        """Count the indices that are left of the pass with the members of now."""
        self._follow()
        left = self._length - self._next % self._length
        return -(-left // self._count)

    @property
    def _count(self) -> int:
        return self._known.count if self._known is not None else 1

    def _follow(self) -> None:
        """Take a new remainder when the membership is another one."""
        now = self._place()
        if now == self._known:
            return
        self._known = now
        start = max(self._next, now.steps * self._batch_size)
        self._next = start + (now.rank - start) % now.count


class ShardedStream(IterableDataset[T]):
    """Every n-th item of a data set that can only be walked through, the first of them by the peer's rank.

    A loader's workers know the membership of when they were started, and must be as many on every peer.
    """

    def __init__(self, items: Iterable[T], place: Callable[[], ShardPlace]) -> None:
        self._items, self._place = items, place

    def __iter__(self) -> Iterator[T]:
        for number, item in enumerate(self._items):
            place = self._place()
            if number % place.count == place.rank:
                yield item

    def __getstate__(self) -> dict[str, Any]:
        """Return what goes to a worker process, as the peer itself cannot."""
        return {"_items": self._items, "_place": _Fixed(self._place())}


@dataclass(frozen=True, slots=True)
class _Fixed:
    place: ShardPlace

    def __call__(self) -> ShardPlace:
        return self.place
