"""What was set while a peer ran, in its folder, so that the next process keeps it.

``settings.json``: ``set``, the settings as they were written; ``given``, what the command line said of them then; and
``paused``, until when or "resume". The newest word counts: what was set stands above the command line for as long as
that says the same, as a service's does at every start, and is forgotten where it says something else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from decentral.errors import ConfigError, DiskError
from decentral.preferences.preferences import SETTINGS, Preferences, changed, setting
from decentral.state.durable import DISK, Disk, disk_errors

SETTINGS_FILE = "settings.json"
_VERSION = 1
_MOST_NBYTES = 1 << 16
_UNTIL_RESUME = "resume"

Paused = float | None  # s since 1970; inf: until decentral resume; None: it is not


@dataclass(frozen=True, slots=True)
class KeptSettings:
    """What is kept; each change makes another one, which ``write`` writes."""

    set_: Mapping[str, str] = field(default_factory=dict)  # setting -> as a person wrote it
    given: Mapping[str, Any] | None = None  # setting -> what the command line said then; None: not known
    paused: Paused = None

    def over(self, flags: Preferences) -> tuple[Preferences, KeptSettings]:
        """What holds for a process with these ``flags``, and what is kept from now on."""
        still = {key: text for key, text in self.set_.items() if self._is_as_before(key, flags)}
        wanted = flags
        for key, text in still.items():
            wanted = changed(wanted, key, text)
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
    """What is kept there; nothing where nothing was set. Raises ConfigError, in one line, for a file that is none."""
    path = folder / SETTINGS_FILE
    try:
        with path.open(encoding="utf-8") as file:
            found = json.loads(file.read(_MOST_NBYTES))
    except FileNotFoundError:
        return KeptSettings()
    except (OSError, ValueError, RecursionError) as error:
        raise _bad(path, f"it cannot be read ({type(error).__name__})") from None
    return _checked(path, found)


def write_settings(folder: Path, kept: KeptSettings, disk: Disk = DISK) -> None:
    """Put them there, whole or not at all. Raises DiskError."""
    paused = _UNTIL_RESUME if kept.paused == float("inf") else kept.paused
    document = {"version": _VERSION, "set": dict(kept.set_), "given": kept.given, "paused": paused}
    with disk_errors(f"writing {folder / SETTINGS_FILE}"):
        disk.replace_file(folder / SETTINGS_FILE, [(json.dumps(document, indent=1) + "\n").encode()])


def _checked(path: Path, found: object) -> KeptSettings:
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        raise _bad(path, f"it is no object with version {_VERSION}")
    set_, given, paused = found.get("set", {}), found.get("given"), found.get("paused")
    if not isinstance(set_, dict) or not all(isinstance(text, str) for text in set_.values()):
        raise _bad(path, "set holds something else than texts")
    if not isinstance(given, dict | None) or isinstance(paused, bool):
        raise _bad(path, "given or paused is of another kind")
    if not (paused is None or paused == _UNTIL_RESUME or isinstance(paused, int | float)):
        raise _bad(path, f'paused is {paused!r:.40}, neither a time nor "{_UNTIL_RESUME}"')
    for key, text in set_.items():
        try:
            changed(Preferences(), key, text)
        except ConfigError as error:
            raise _bad(path, f"{key!r:.40}: {error}") from None
    return KeptSettings(set_, given, float("inf") if paused == _UNTIL_RESUME else paused)


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
