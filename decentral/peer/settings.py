"""A peer as it was asked to be: how ``join`` was called, and what follows from that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from decentral.errors import ConfigError
from decentral.manifest import Manifest
from decentral.swarm.invite import Invite
from decentral.training.inner import Together
from decentral.training.inner_states import InnerStates
from decentral.training.live_model import LiveModel
from decentral.transport import Transport
from decentral.transport.throttle import Caps

Observer = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """The keyword arguments of ``join``, which says what they mean and has their defaults."""

    accelerator: Any | None  # Any: accelerate is untyped
    out: str | Path | None
    listen: Sequence[str] | None
    scheduler: Any | None  # Any: as in ``join``
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

    def __post_init__(self) -> None:
        if self.on_nan not in ("stop", "restart"):
            raise ConfigError(f'join(on_nan={self.on_nan!r}): "stop" and "restart" are known')


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One peer's: its options, and what follows from them. Rates in bytes per second."""

    options: JoinOptions
    manifest: Manifest
    invite: Invite | None  # None: it founds the run, or resumes what is in ``out``
    model: LiveModel
    optimizers: Together  # whose ``step`` is hooked
    states: InnerStates  # of them, of the schedulers and of random generators
    out: Path  # absolute
    called: Path  # the same as it was written
    identity_path: Path
    give_up_at: float | None  # monotonic s, when it stops looking for others
    caps: Caps
    daily_upload: int | None  # bytes
    admit: str | None  # the admission token, as given; what the folder keeps is not in it
