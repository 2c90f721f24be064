"""Between a running job and the people around it: what they ask of it, what it tells them."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from decentral.cli.bench import Bench
from decentral.manifest import Manifest
from decentral.observe.status import Status

if TYPE_CHECKING:
    from decentral.peer import Peer


class Steering:
    """What people ask of a running job: from a signal, or from another command through the run directory."""

    def __init__(self, bench: Bench, peer: "Peer") -> None:
        self._bench, self._peer = bench, peer
        self.left = False

    def obey(self, request: str) -> None:
        """Do what one of ``leave``, ``pause``, ``resume`` asks."""
        {"leave": self.leave, "pause": self.pause, "resume": self.resume}[request]()

    def leave(self) -> None:
        """End at the next step boundary."""
        self.left = True
        self._peer.leave()
        self._bench.running.set()

    def pause(self) -> None:
        """Stop training. With several processes only contributing stops: the others would wait in a collective."""
        self._peer.pause()
        if self._bench.accelerator.num_processes == 1:
            self._bench.running.clear()

    def resume(self) -> None:
        """Train on."""
        self._peer.resume()
        self._bench.running.set()


class Teller:
    """Tells the beacon how the peer is; hands its invite on once; keeps the last word when the peer has gone."""

    def __init__(self, peer: "Peer", manifest: Manifest, on_invite: Callable[[str], None]) -> None:
        self._peer, self._on_invite = peer, on_invite
        self._last = Status(run=manifest.run.name, run_id=manifest.digest.hex(), algorithm=manifest.outer.method)
        self._ended = ""

    def __call__(self) -> Status:
        """The status now."""
        if self._ended:
            return replace(self._last, state=self._ended)
        self._last = self._peer.status()
        if self._last.invite and self._on_invite is not _keep_quiet:
            self._on_invite(self._last.invite)
            self._on_invite = _keep_quiet
        return self._last

    def end(self, state: str) -> None:
        """From now on the peer is not asked any more: this is its last word."""
        self()
        self._ended = state


def _keep_quiet(invite: str) -> None:
    """The invite was told already."""
