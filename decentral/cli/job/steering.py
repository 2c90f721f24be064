"""Between a running job and the people around it: what they ask of it, what it tells them."""

import time
from collections.abc import Callable
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING

from decentral.cli.job.training_context import TrainingContext
from decentral.observe.status import Status
from decentral.peer.limits import settle_device
from decentral.preferences.preferences import Duty, Preferences
from decentral.tensors.threads import ThreadsWanted

if TYPE_CHECKING:
    from decentral.peer import Peer


class Steering:
    """What people ask of a running job: from a signal, or from another command through the run directory."""

    def __init__(self, context: TrainingContext, peer: "Peer") -> None:
        self._context, self._peer = context, peer
        self.left = False

    def leave(self) -> None:
        """End at the next step boundary."""
        self.left = True
        self._peer.leave()
        self._context.running.set()

    def finish(self) -> None:
        """End with the next round that is committed; at once where none comes."""
        if self._peer.rests:
            self.leave()
        else:
            self._peer.finish()

    def limit(self, wanted: Preferences) -> None:
        """Hold to these rates, and compute with so many threads."""
        self._peer.limit(wanted)

    @property
    def trains_while_paused(self) -> bool:
        """With several processes only contributing stops: the others would wait in a collective."""
        return bool(self._context.accelerator.num_processes > 1)

    def pause(self) -> None:
        """Stop training, as far as that can be."""
        self._peer.pause()
        if not self.trains_while_paused:
            self._context.running.clear()

    def resume(self) -> None:
        """Train on."""
        self._peer.resume()
        self._context.running.set()


class SteeringAlone:
    """What people ask of a baseline: it has no rounds, and no lines to others."""

    def __init__(self, context: TrainingContext, halted: Event) -> None:
        self._context, self._halted = context, halted
        self._duty, self._threads = Duty(time.monotonic, settle_device), ThreadsWanted()

    def leave(self) -> None:
        """End at the next step."""
        self._halted.set()
        self._context.running.set()

    finish = leave

    def pause(self) -> None:
        """Stop training."""
        self._context.running.clear()

    def resume(self) -> None:
        """Train on."""
        self._context.running.set()

    def limit(self, wanted: Preferences) -> None:
        """Compute with so many threads, and for such a share of the time."""
        self._threads.want(wanted.threads)
        self._duty.share = wanted.max_compute or 1.0

    def rest(self) -> None:
        """After an inner step, for as long as that share asks for."""
        if seconds := self._duty.worked():
            self._halted.wait(seconds)
        self._duty.goes_on()


class StatusPublisher:
    """Tells the beacon how the peer is; hands its invite on once; has the last word when the peer has gone.

    ``look`` acts on a status before it is told, and adds to it.
    """

    def __init__(
        self,
        peer: "Peer",
        on_invite: Callable[[str], None],
        look: Callable[[Status], Status] = lambda status: status,
        *,
        trains_while_paused: bool,
        keeps_serving: bool = False,
    ) -> None:
        self._peer, self._on_invite, self._look = peer, on_invite, look
        self._trains_while_paused, self._keeps_serving = trains_while_paused, keeps_serving
        self._ended = ""

    def __call__(self) -> Status:
        """The status now; the last one that there was, once the peer's swarm side has ended."""
        status = replace(self._peer.status(), own_loop=False, trains_while_paused=self._trains_while_paused)
        if self._ended:
            return replace(status, state=self._ended)
        if status.invite and self._on_invite is not _keep_quiet and self._lets_in(status):
            self._on_invite(status.invite)
            self._on_invite = _keep_quiet
        return self._look(status)

    def _lets_in(self, status: Status) -> bool:
        """Not who is no member: it may have come after the run's end, and goes at once then.

        Before it has the others' chain, a peer knows itself alone.
        """
        member = any(member.get("self") for member in status.members)
        return status.state not in ("starting", "syncing") and (member or self._keeps_serving)

    def end(self, state: str) -> None:
        """From now on this is its state, whatever else is new."""
        self()  # a run that took less than a second has an invite, too
        self._ended = state

    def take_back(self, kind: type[BaseException] | None, *_: object) -> None:
        """An error came after all, as on a full disk: it did not end as was said. As the exit of a block.

        A Ctrl-C while it says goodbye is none: everything is kept by then.
        """
        if kind is not None and issubclass(kind, Exception):
            self._ended = ""


def _keep_quiet(invite: str) -> None:
    """The invite was told already."""
