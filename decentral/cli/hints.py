"""A word on the screen for somebody that waits longer than usual."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import click


@contextmanager
def hint_after(seconds: float, text: str) -> Iterator[None]:
    """Say ``text`` on stderr, once, when the block has lasted so long."""
    timer = threading.Timer(seconds, click.echo, (text,), {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
