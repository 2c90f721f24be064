"""How one peer takes part, from ``start`` and ``join`` to the loop that trains. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from decentral.preferences.preferences import ALWAYS, Hours, Preferences


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What the command line says about this peer; what all peers agree on is in the manifest."""

    out: Path
    data: Path | None = None
    begins_from: Path | None = None  # model folder with the run's first weights; None: drawn from the run's seed
    listen: tuple[str, ...] = ()  # multiaddrs; none: all interfaces
    transport: str | None = None  # "daemon", "native", "py-libp2p"; None: the daemon where this system has one
    relays: tuple[str, ...] = ()  # multiaddrs
    lan: bool = True  # announced and looked for on the local networks
    require_peers: int = 0
    waits_for_company: bool = False  # before it trains, until the run has, or had, a second member
    give_up_at: float | None = None  # monotonic seconds, when it looks for others no longer
    keep_serving: bool = False  # after the run's end, see join
    on_nan: Literal["stop", "restart"] = "stop"  # see join
    max_upload: float | None = None  # bytes/s
    max_download: float | None = None  # bytes/s
    daily_upload: int | None = None  # bytes
    schedule: Hours = ALWAYS  # hours of the day in which it trains
    on_battery: Literal["train", "pause"] = "train"
    only_when_idle: bool = False  # it waits while somebody uses the machine
    max_memory: int | None = None  # bytes
    offload: Path | None = None  # folder for what rounds need beside the model; None: memory
    threads: int | None = None  # that torch computes with
    max_compute: float | None = None  # share of the time
    admit: str | None = None  # admission token; None: the invite's, or the folder's
    invite: str | None = None  # None: this is the first peer
    solo: bool = False  # the baseline, without a swarm
    pace: Path | None = None  # a baseline keeps in step with the peer that runs there
    dashboard: bool = False  # the page beside it
    metrics: tuple[str, int] | None = None  # address and port at which Prometheus asks
    as_json: bool = False  # summary.json on stdout, and nothing else there

    @property
    def preferences(self) -> Preferences:
        """What of it may be set anew while the peer runs."""
        return Preferences(
            schedule=self.schedule,
            on_battery=self.on_battery,
            only_when_idle=self.only_when_idle,
            max_memory=self.max_memory,
            threads=self.threads,
            max_compute=self.max_compute,
            max_upload=self.max_upload,
            max_download=self.max_download,
            daily_upload=self.daily_upload,
        )
