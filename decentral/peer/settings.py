"""What a peer was asked to be, once ``join`` has made sense of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from decentral.manifest import Manifest
from decentral.swarm.invite import Invite
from decentral.training.inner_optimizers import Together
from decentral.training.live_model import LiveModel
from decentral.transport import Transport
from decentral.transport.throttle import Caps

Observer = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One peer's. Rates in bytes per second."""

    manifest: Manifest
    invite: Invite | None  # None: it founds the run, or resumes what is in ``out``
    model: LiveModel
    optimizers: Together  # whose ``step`` is hooked
    schedulers: Together | None
    out: Path
    listen: Sequence[str] | None
    require_peers: int  # members to wait for
    give_up_at: float | None  # monotonic s, when it stops looking for others
    observer: Observer | None
    identity_path: Path
    checkpoint_every: int  # commits
    tokens_per_step: int
    caps: Caps
    daily_upload: int | None  # bytes
    transport: Transport | str | None
    relays: tuple[str, ...]
    lan: bool
    on_nan: Literal["stop", "restart"]  # raise, or put the live model back to the anchor
    admit: str | None  # the admission token, as given; what the folder keeps is not in it
    keep_serving: bool  # stay after the run's end, for those who come late
    commands: bool  # tell and hear the commands of other terminals through ``out``
    quiet: bool  # no lines on stderr
