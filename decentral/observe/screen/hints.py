"""A word on the screen for somebody that waits longer than usual."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def hint_after(seconds: float, text: str) -> Iterator[None]:
    """Say ``text`` on stderr, once, when the block has lasted so long."""
    timer = threading.Timer(seconds, say, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say(text: str) -> None:
    """A line on stderr, whoever still reads that."""
    if sys.stderr is None:  # a process without any, as pythonw
        return
    with suppress(OSError, ValueError):  # closed, or on a disk that is full
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
