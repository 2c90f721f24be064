"""What an integration passes on to ``decentral.join``: its keyword arguments, but those that the framework knows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from decentral.manifest import Manifest
from decentral.peer.settings import Observer
from decentral.plugins import nearest
from decentral.transport import Transport

Run = str | Path | Manifest | None


class JoinKeywords(TypedDict, total=False):
    """Those of ``decentral.join``, which says what they mean; accelerator and scheduler are the framework's to give."""

    out: str | Path | None
    listen: Sequence[str] | None
    require_peers: int
    join_timeout: float | None
    observer: Observer | None
    identity_path: str | Path | None
    checkpoint_every: int
    tokens_per_step: int
    max_upload: float | str | None
    max_download: float | str | None
    daily_upload: int | str | None
    transport: Transport | str | None
    relays: Sequence[str]
    lan: bool
    commands: bool
    admit: str | None
    on_nan: Literal["stop", "restart"]
    quiet: bool
    keep_serving: bool
    offload: str | Path | None


_SECRET = ("admit",)  # others may read what is written down of a training run, and it may be published


def check_keywords(caller: str, given: Mapping[str, object]) -> None:
    """TypeError for a name that ``join`` has not, as Python says it, when the object is made and not hours later."""
    for name in given:
        if name not in JoinKeywords.__annotations__:
            raise TypeError(f"{caller}(): no keyword {name!r}; {nearest(name, JoinKeywords.__annotations__)}")


def written_down(given: JoinKeywords) -> dict[str, Any]:  # Any: JSON
    """What of it can be kept as JSON and read by anybody: no token, and nothing that lives in this process only."""
    plain = {name: os.fspath(value) if isinstance(value, Path) else value for name, value in given.items()}
    return {name: value for name, value in plain.items() if name not in _SECRET and _is_json(value)}


def read_back(kept: Mapping[str, Any]) -> JoinKeywords:
    """What was written down, as keywords."""
    return cast(JoinKeywords, dict(kept))


def _is_json(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_json(one) for one in value)
    return value is None or isinstance(value, str | int | float | bool)
