"""A peer whose ``with`` block a framework opens in one of its calls and closes in another.

Frameworks that are ended by an error or by Ctrl-C do not always make the second call. The process then still leaves the
run when it ends, as the block would have: without a checkpoint after an error, with one and a goodbye after Ctrl-C.
"""

from __future__ import annotations

import atexit
import sys

from decentral.errors import DecentralError
from decentral.peer import Peer


class Entered:
    """One peer at a time, entered and left."""

    def __init__(self) -> None:
        self._peer: Peer | None = None

    @property
    def peer(self) -> Peer | None:
        """The one that takes part now."""
        return self._peer

    def enter(self, peer: Peer) -> Peer:
        """Begin to take part. One that was not left before was cut off with its loop, and ends without a word."""
        if self._peer is not None:
            self.leave(DecentralError("another training loop begins"))
        peer.__enter__()
        self._peer = peer
        atexit.register(self._at_exit)
        return peer

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the run; ``error``: what ended the training loop, if it did not come to its own end."""
        peer, self._peer = self._peer, None
        atexit.unregister(self._at_exit)
        if peer is not None:
            peer.__exit__(None if error is None else type(error), error, None)

    def _at_exit(self) -> None:
        """The process ends with a peer that nobody left: by what Python was told of last, or just so."""
        self.leave(getattr(sys, "last_value", None) or SystemExit())
