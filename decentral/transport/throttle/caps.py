"""What a peer may send and receive per second, and the least that others do not take for its death."""

from __future__ import annotations

from dataclasses import dataclass

from decentral.errors import ConfigError
from decentral.transport.watchdog import LEAST_RATE

# bytes/s: at 32 kB/s a reader lets the daemon's sender move every 14 to 22 s (experiments/LOG.md), of 30 s at most
LEAST_CAP = 8 * LEAST_RATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """Payload bytes per second over all streams together, each way; None: no cap."""

    up: float | None = None
    down: float | None = None

    def __post_init__(self) -> None:
        for name, rate in (("up", self.up), ("down", self.down)):
            if rate is not None and not rate >= LEAST_CAP:
                raise ConfigError(
                    f"Caps({name}={rate:g}): at least {LEAST_CAP} bytes/s (263 kbit/s), or other peers take this one "
                    "for dead; leave it out for no cap"
                )
