"""What a folder says of its peer, for the commands that look into one."""

import time
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
    return status, is_running(status)
