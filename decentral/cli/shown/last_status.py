"""What a folder says of its peer, for the commands that look into one."""

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decentral.observe.status import Status


def read_peer(directory: Path) -> "tuple[Status, bool]":
    """The last status and whether its process runs; the sentence is another when it is gone without a word."""
    from decentral.observe.health import lost_sentence
    from decentral.observe.status import is_lost, is_running, read_status

    status = read_status(directory)
    if is_lost(status):
        status = replace(status, health=lost_sentence(status, time.time()))
    alive = is_running(status)
    return status if alive else _with_settings(status, directory), alive


def _with_settings(status: "Status", directory: Path) -> "Status":
    """What was set since its process ended holds for the next one."""
    from decentral.errors import ConfigError
    from decentral.preferences.controls import read_settings
    from decentral.preferences.preferences import Preferences, changed, spelled

    with suppress(ConfigError):  # the next start says what is wrong with the file
        kept, wanted = read_settings(directory).set_, Preferences()
        for key, text in kept.items():
            wanted = changed(wanted, key, text)
        before = {key: text for key, text in status.preferences.items() if key not in kept}
        return replace(status, preferences={**before, **spelled(wanted)}, kept_settings=tuple(kept))
    return status
