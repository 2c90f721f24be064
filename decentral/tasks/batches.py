"""Which bytes a peer sees at a step: a pure function of (seed, peer, row), so any step can be resumed.

Counter-based: row ``i`` (= step * batch_size + position in the batch) starts where blake2b of (seed, peer,
i) says. No generator to save, no peer's data depends on another's, and two peers never walk the same order.
"""

from collections.abc import Iterator
from hashlib import blake2b

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from decentral.errors import DataError

Row = dict[str, Tensor]  # input_ids and labels, int64 (context,); the model shifts the labels by one itself


def window_start(seed: int, peer: bytes, row: int, num_starts: int) -> int:
    """First byte of this peer's ``row``-th window, uniform in [0, num_starts)."""
    counter = seed.to_bytes(8, "little", signed=True) + row.to_bytes(8, "little")
    hashed = blake2b(counter + peer, digest_size=16, person=b"decentral-batch").digest()
    return int.from_bytes(hashed, "little") % num_starts  # 128 bits: the bias of % is below 2**-64


def batch_at(train: Tensor, *, seed: int, peer: bytes, step: int, batch_size: int, context: int) -> dict[str, Tensor]:
    """Batch of one inner step: ``input_ids`` and ``labels``, int64 (batch_size, context).

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
        """Row ``row`` of this peer, whatever was read before."""
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
    """Endless batches from inner step ``first_step`` on, ready for ``accelerator.prepare``.

    With several processes per peer each inner step takes ``num_processes`` batches: resume with
    ``first_step = inner steps done * num_processes``.
    """
    rows = RowStream(train, seed=seed, peer=peer, context=context, start=first_step * batch_size)
    # A generator of its own: the loader draws a base seed from the global one otherwise.
    return DataLoader(rows, batch_size=batch_size, generator=torch.Generator().manual_seed(0))
