"""A stream of a device beside the one that trains: what is asked of it there does not wait for inner steps, nor they
for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["aside"]


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """What is done inside goes to that stream, from this thread. It begins when all is there that was asked for before,
    which is an inner step or two; what it made must be waited for before the end: nothing else orders the streams.
    """
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
