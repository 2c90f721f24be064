"""A peer whose ``with`` block a framework opens in one of its calls and closes in another.

Frameworks that are ended by an error or by Ctrl-C do not always make the second call. The process then still leaves the
run when it ends, as the block would have: without a checkpoint after an error, with one and a goodbye after Ctrl-C.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping
from typing import Any

from decentral.errors import ConfigError, DecentralError
from decentral.peer import Peer


class Entered:
    """One peer at a time, entered and left."""

    def __init__(self) -> None:
        self._peer: Peer | None = None

    @property
    def peer(self) -> Peer | None:
        """The one that takes part now."""
        return self._peer

    def enter(self, peer: Peer, *, wait_for_company: bool) -> None:
        """Begin to take part, and say how others join. One that was not left before ends: its loop was cut off."""
        if self._peer is not None:
            self.leave(DecentralError("another training loop begins"))
        peer.__enter__()
        self._peer = peer
        atexit.register(self._at_exit)
        if peer.invite and not peer.settings.options.quiet:
            sys.stderr.write(f"decentral: decentral join {peer.invite} --script {sys.argv[0]}\n")
        if wait_for_company and not peer.done:
            peer.wait_for_company()

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the run; ``error``: what ended the training loop, if it did not come to its own end."""
        peer, self._peer = self._peer, None
        atexit.unregister(self._at_exit)
        if peer is not None:
            peer.__exit__(None if error is None else type(error), error, None)

    def _at_exit(self) -> None:
        """The process ends with a peer that nobody left: by what Python was told of last, or just so."""
        self.leave(getattr(sys, "last_value", None) or SystemExit())


def kept_of(peer: Peer) -> dict[str, Any]:  # Any: JSON
    """What a framework's checkpoint remembers of the run: where it was, and no secret."""
    where = {"out": str(peer.out), "run_id": peer.manifest.digest.hex()}
    return {**where, "round": peer.round, "inner_steps": peer.inner_steps}


def check_goes_on(kept: Mapping[str, Any], peer: Peer, checkpoint: str) -> None:
    """ConfigError for a peer that would found a run anew of which the framework's ``checkpoint`` has rounds behind it.

    ``kept``: what that checkpoint remembers, empty for one of another training loop. The peer is not entered yet.
    """
    if not kept.get("round") or kept["run_id"] != peer.manifest.digest.hex() or peer.settings.invite is not None:
        return
    if not any((peer.out / "checkpoints").glob("*")):
        raise ConfigError(
            f"{checkpoint} was written after round {kept['round']} of this run, and {peer.out} holds no checkpoint of "
            f"the peer; pass out={kept['out']!r}, or join by an invite"
        )
