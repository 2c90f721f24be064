"""Between one peer and the people around it: what they ask, what they prefer, and why it waits."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import psutil

from decentral.errors import ConfigError, DiskError
from decentral.observe.requests import Request
from decentral.observe.status import Status
from decentral.preferences.preferences import SETTINGS, Preferences, Seen, reasons_to_wait, setting, spell, with_setting
from decentral.state.durable import DISK, Disk, disk_errors

# States of a peer that may be paused, or trains again.
_TRAINS = ("training", "looking", "waiting", "paused", "resting")


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
            preferences=spell(self.wanted),
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
            wanted = with_setting(self.wanted, str(key), str(value))
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
        reasons = (*self._pause_asked(now), *reasons_to_wait(self.wanted, self._seen(), now))
        if bool(reasons) != bool(self.because):
            (self._steered.pause if reasons else self._steered.resume)()
            if reasons and self.finishing:  # the round that it waits for will not come
                self._steered.finish()
        self.because = reasons

    def _pause_asked(self, now: datetime) -> tuple[str, ...]:
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


# ---- settings that outlive the process ----
#
# The folder keeps what was set while a peer ran, so that the next process has it.
#
# ``settings.json``: ``set``, the settings as they were written; ``given``, what the command line said of them then; and
# ``paused``, until when or "resume". The newest word counts: what was set stands above the command line for as long as
# that says the same, as a service's does at every start, and is forgotten where it says something else.

SETTINGS_FILE = "settings.json"
_SETTINGS_VERSION = 1
_MOST_NBYTES = 1 << 16
_UNTIL_RESUME = "resume"

_FOR_GOOD = float("inf")
Paused = float | None  # s since 1970; _FOR_GOOD: until decentral resume; None: it is not


@dataclass(frozen=True, slots=True)
class KeptSettings:
    """The settings that are kept; each change makes another object, for `write_settings`."""

    set_: Mapping[str, str] = field(default_factory=dict)  # setting -> as a person wrote it
    given: Mapping[str, Any] | None = None  # setting -> what the command line said then; None: not known
    paused: Paused = None

    def over(self, flags: Preferences) -> tuple[Preferences, KeptSettings]:
        """Return the preferences that hold for a process with these ``flags``, and what is kept from now on."""
        still = {key: text for key, text in self.set_.items() if self._is_as_before(key, flags)}
        wanted = flags
        for key, text in still.items():
            wanted = with_setting(wanted, key, text)
        return wanted, replace(self, set_=still, given={key: _plain(flags, key) for key in SETTINGS})

    def with_setting(self, key: str, text: str) -> KeptSettings:
        """``key`` is set."""
        return replace(self, set_={**self.set_, key: text.strip()})

    def with_pause(self, until: Paused) -> KeptSettings:
        """It is paused until then, or no more."""
        return replace(self, paused=until)

    def _is_as_before(self, key: str, flags: Preferences) -> bool:
        return self.given is None or key not in self.given or self.given[key] == _plain(flags, key)


def read_settings(folder: Path) -> KeptSettings:
    """Read the settings that are kept there; none where nothing was set. Raises ConfigError for a file that is none."""
    path = folder / SETTINGS_FILE
    try:
        with path.open(encoding="utf-8") as file:
            found = json.loads(file.read(_MOST_NBYTES))
    except FileNotFoundError:
        return KeptSettings()
    except (OSError, ValueError, RecursionError) as error:
        raise _bad(path, f"it cannot be read ({type(error).__name__})") from None
    return _check(path, found)


def write_settings(folder: Path, kept: KeptSettings, disk: Disk = DISK) -> None:
    """Put them there, whole or not at all. Raises DiskError."""
    paused = _UNTIL_RESUME if kept.paused == _FOR_GOOD else kept.paused
    document = {"version": _SETTINGS_VERSION, "set": dict(kept.set_), "given": kept.given, "paused": paused}
    with disk_errors(f"writing {folder / SETTINGS_FILE}"):
        disk.replace_file(folder / SETTINGS_FILE, [(json.dumps(document, indent=1) + "\n").encode()])


def _check(path: Path, found: object) -> KeptSettings:
    if not isinstance(found, dict) or found.get("version") != _SETTINGS_VERSION:
        raise _bad(path, f"it is no object with version {_SETTINGS_VERSION}")
    set_, given, paused = found.get("set", {}), found.get("given"), found.get("paused")
    if not isinstance(set_, dict) or not all(isinstance(text, str) for text in set_.values()):
        raise _bad(path, "set holds something else than texts")
    if not isinstance(given, dict | None) or isinstance(paused, bool):
        raise _bad(path, "given or paused is of another kind")
    if not (paused is None or paused == _UNTIL_RESUME or isinstance(paused, int | float)):
        raise _bad(path, f'paused is {paused!r:.40}, neither a time nor "{_UNTIL_RESUME}"')
    for key, text in set_.items():
        try:
            with_setting(Preferences(), key, text)
        except ConfigError as error:
            raise _bad(path, f"{key!r:.40}: {error}") from None
    return KeptSettings(set_, given, _FOR_GOOD if paused == _UNTIL_RESUME else paused)


def _plain(flags: Preferences, key: str) -> str | float | bool | None:
    """As JSON has it."""
    value = getattr(flags, setting(key)[0])
    return value if isinstance(value, str | int | float | None) else str(value)


def _bad(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: {why}; mend it, or remove it and go by the command line alone")


def keep_setting(folder: Path, key: str, text: str) -> None:
    """For a peer that does not run now: the next process has it. Raises ConfigError, DiskError."""
    kept = read_settings(folder)
    if not folder.is_dir():
        raise DiskError(f"{folder}: no such folder; name what was given to --out")
    write_settings(folder, kept.with_setting(key, text))


# ---- the computer around a peer ----
#
# Does it run on battery, does somebody use it, what do other programs take? What a system does not tell is None, and
# stands against nothing.

_DEVICES = Path("/dev")
_SMOOTH = 15.0  # s over which other programs' share is averaged: a page that loads is no use


class Computer:
    """Looks at this computer."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._load = OthersLoad(_busy_seconds, self._own_seconds, time.monotonic, os.cpu_count() or 1)

    def look(self, *, battery: bool, use: bool) -> Seen:
        """Look at the battery, and at the use of the machine, where it is asked for."""
        return Seen(
            on_battery=on_battery() if battery else None,
            unused_seconds=unused_seconds(time.time()) if use else None,
            others_share=self._load.share() if use else None,
        )

    def memory(self) -> int:
        """Bytes of memory that this process holds."""
        return int(self._process.memory_info().rss)

    def _own_seconds(self) -> float:
        """Add up the processor seconds of this process and those that it started (the daemon, loaders of data)."""
        seconds = 0.0
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            seconds += times.user + times.system
        return seconds


class OthersLoad:
    """Share of all processors that other programs took, averaged over some seconds."""

    def __init__(
        self, busy: Callable[[], float], own: Callable[[], float], clock: Callable[[], float], num_cpus: int
    ) -> None:
        self._busy, self._own, self._clock, self._num_cpus = busy, own, clock, num_cpus
        self._share: float | None = None
        self._last = (clock(), busy(), own())

    def share(self) -> float | None:
        """None before there is a second to judge by."""
        now, busy, own = self._clock(), self._busy(), self._own()
        passed = now - self._last[0]
        if passed >= 1.0:
            taken = max(0.0, (busy - self._last[1]) - max(0.0, own - self._last[2]))
            found = min(1.0, taken / (passed * self._num_cpus))
            weight = min(1.0, passed / _SMOOTH)
            self._share = found if self._share is None else self._share + weight * (found - self._share)
            self._last = (now, busy, own)
        return self._share


def on_battery() -> bool | None:
    """Tell whether this computer has a battery, and runs on it."""
    sensor = getattr(psutil, "sensors_battery", lambda: None)
    battery = sensor()
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def unused_seconds(now: float, terminals: Callable[[], list[str]] | None = None) -> float | None:
    """Seconds since somebody typed at a terminal of this computer, as ``w`` tells it; None when nobody is logged in.

    Desktops without a terminal do not show here; what their programs take does.
    """
    if sys.platform == "win32":
        return None
    touched = []
    for name in (terminals or _terminals)():
        try:
            touched.append((_DEVICES / name).stat().st_atime)
        except OSError:
            continue
    return max(0.0, now - max(touched)) if touched else None


def _terminals() -> list[str]:
    return [user.terminal for user in psutil.users() if user.terminal]


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))
