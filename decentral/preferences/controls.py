"""Between one peer and the people around it: what they ask, what they prefer, and why it waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from decentral.errors import ConfigError, DiskError
from decentral.observe.requests import Request
from decentral.observe.status import Status
from decentral.preferences.computer import Computer
from decentral.preferences.kept import KeptSettings, read_settings, write_settings
from decentral.preferences.preferences import Preferences, Seen, changed, reasons_to_wait, spelled

_TRAINS = (
    "training",
    "looking",
    "waiting",
    "paused",
    "resting",
)  # states of a peer that may be paused, or trains again
_FOR_GOOD = float("inf")


class Steered(Protocol):
    """A peer, or the job around one."""

    def leave(self) -> None:
        """End at the next step."""

    def finish(self) -> None:
        """End with the next round that is committed."""

    def pause(self) -> None:
        """Contribute nothing for now."""

    def resume(self) -> None:
        """Contribute again."""

    def limit(self, wanted: Preferences) -> None:
        """Hold to these rates, and compute with so many threads."""


class Controls:
    """Obeys requests, looks whether training may go on, and tells a status why it does not.

    ``wall`` tells the local time. The peer's beacon calls it, about once a second. With a ``folder``, what is set or
    paused outlives the process there; ConfigError when what is kept there cannot be read.
    """

    def __init__(
        self,
        steered: Steered,
        wanted: Preferences | None = None,
        *,
        folder: Path | None = None,
        machine: Computer | None = None,
        wall: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ) -> None:
        flags, self._folder = wanted or Preferences(), folder
        found = KeptSettings() if folder is None else read_settings(folder)
        self.wanted, self._kept = found.over(flags)
        self.unheard = ""  # a sentence, of the newest request that could not be obeyed, or not be kept
        self.because: tuple[str, ...] = ()  # it waits
        self.finishing = False
        self.too_large = ""  # a sentence, once the process holds more memory than it may
        self._steered, self._machine, self._wall = steered, machine or Computer(), wall
        self._paused_until = self._kept.paused  # s since 1970
        if self.wanted != flags or (self.wanted.threads, self.wanted.max_compute) != (None, None):
            steered.limit(self.wanted)
        if found != KeptSettings():
            self._keep(self._kept)

    def obey(self, request: Request) -> None:
        """Do what one request asks. A value that cannot be read changes nothing, and the status says so."""
        self.unheard = ""
        {
            "leave": self._leave,
            "finish": self._finish,
            "pause": self._pause,
            "resume": self._resume,
            "set": self._set,
        }[request.name](**request.values)
        self._look_at_reasons()

    def look(self, status: Status) -> Status:
        """Pause or go on as the hour, the machine and its people will have it; ``status`` with what follows from it."""
        if status.state in _TRAINS:
            self._look_at_reasons()
            self._look_at_memory()
        problem = status.problem or self.too_large or self.unheard
        return replace(
            status,
            paused_because=self.because if status.state == "paused" else (),
            finishing=self.finishing,
            preferences=spelled(self.wanted),
            kept_settings=tuple(self._kept.set_),
            problem=problem,
        )

    def _leave(self, **_: Any) -> None:
        self._steered.leave()

    def _finish(self, **_: Any) -> None:
        self.finishing = True
        self._steered.finish()

    def _pause(self, until: object = None, **_: Any) -> None:
        self._paused_until = float(until) if isinstance(until, int | float) else _FOR_GOOD
        self._keep(self._kept.with_pause(self._paused_until))

    def _resume(self, **_: Any) -> None:
        self._paused_until = None
        self._keep(self._kept.with_pause(None))

    def _set(self, key: object = "", value: object = "", **_: Any) -> None:
        try:
            wanted = changed(self.wanted, str(key), str(value))
            self._steered.limit(wanted)
        except ConfigError as error:
            self.unheard = f"the request to set {str(key)[:40]!r} was not obeyed: {error}"
            return
        self.wanted = wanted
        self._keep(self._kept.with_setting(str(key), str(value)))

    def _keep(self, kept: KeptSettings) -> None:
        """It holds in any case; what cannot be written holds until the process ends."""
        self._kept = kept
        if self._folder is None:
            return
        try:
            write_settings(self._folder, kept)
        except DiskError as error:
            self.unheard = f"what was asked for holds until this process ends: {error}"

    def _look_at_reasons(self) -> None:
        now = self._wall()
        reasons = (*self._asked_for(now), *reasons_to_wait(self.wanted, self._seen(), now))
        if bool(reasons) != bool(self.because):
            (self._steered.pause if reasons else self._steered.resume)()
            if reasons and self.finishing:  # the round that it waits for will not come
                self._steered.finish()
        self.because = reasons

    def _asked_for(self, now: datetime) -> tuple[str, ...]:
        if self._paused_until is not None and self._paused_until <= now.timestamp():
            self._paused_until = None
            self._keep(self._kept.with_pause(None))
        if self._paused_until is None:
            return ()
        if self._paused_until == _FOR_GOOD:
            return ("as asked, until decentral resume",)
        return (f"as asked, until {datetime.fromtimestamp(self._paused_until, now.tzinfo):%H:%M}",)

    def _seen(self) -> Seen:
        """Looking costs a little, so only what somebody wants to know is looked at."""
        wanted = self.wanted
        return self._machine.look(battery=wanted.on_battery == "pause", use=wanted.only_when_idle)

    def _look_at_memory(self) -> None:
        most = self.wanted.max_memory
        if most is None or self.too_large or (held := self._machine.memory()) <= most:
            return
        self.too_large = (
            f"this process holds {held / 1e9:.2f} GB, more than the {most / 1e9:.2f} GB of max-memory, and leaves; "
            "everything is kept: start it again with more, or with a smaller batch"
        )
        self._steered.leave()
