"""Which part of a data set a peer trains on: disjoint from the other members', shared out anew when they change.

All peers walk one endless row of places: one pass over the data set in shuffled order, the next in another, and so on.
The member of rank r among n takes the places that leave r when divided by n. While the membership stays as it is,
nobody takes what another member took: no index is drawn twice in a pass, and every index of a pass is drawn once all
members have been through it. When the membership changes, each goes on with its new remainder at the place that the
committed rounds have reached, or where it was if that is further: what members had drawn beyond it may be drawn again,
and what a slower one had not reached is left out of this pass. No message is sent, and nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

from torch.utils.data import IterableDataset, Sampler

from decentral.errors import ConfigError
from decentral.tasks.shuffle import Shuffle

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Where a peer stands among the members of a run; it changes at step boundaries, alike on all its processes."""

    rank: int = 0  # among ``count``
    count: int = 1  # members, this peer included
    steps: int = 0  # inner steps of all peers together behind the membership's beginning, as commits tell them


def seed_of(run: bytes, who: bytes) -> int:
    """63 bits that follow from a run's digest and a name."""
    hashed = blake2b(run + who, digest_size=8, person=b"decentral-seed").digest()
    return int.from_bytes(hashed, "little") >> 1


def shard(dataset: Any, batch_size: int, run: bytes, place: Callable[[], ShardPlace]) -> Any:
    """A ShardSampler, or a ShardedStream of what has no indices. ``Any``: torch's Dataset promises no length.

    ConfigError for an empty data set or batch.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return ShardedStream(dataset, place)
    if not len(dataset) or batch_size < 1:
        raise ConfigError(f"shard: {len(dataset)} items by {batch_size} per step; there must be one of each at least")
    return ShardSampler(len(dataset), batch_size, run, place)


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
        """Indices that are left of the pass with the members of now."""
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

    def __init__(
        self, items: Any, place: Callable[[], ShardPlace]
    ) -> None:  # Any: an iterable, perhaps of another library
        self._items, self._place = items, place

    def __iter__(self) -> Iterator[T]:
        for number, item in enumerate(self._items):
            place = self._place()
            if number % place.count == place.rank:
                yield item

    def __getstate__(self) -> dict[str, Any]:
        """What goes to a worker process: the peer itself cannot."""
        return {"_items": self._items, "_place": _Fixed(self._place())}


@dataclass(frozen=True, slots=True)
class _Fixed:
    place: ShardPlace

    def __call__(self) -> ShardPlace:
        return self.place
