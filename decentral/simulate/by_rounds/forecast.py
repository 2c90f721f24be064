"""What a run would do, reckoned round by round: seconds for hundreds of peers, where messages take minutes for 64.

Nothing of the protocol is run, and so nothing checked. docs/simulation.md has how far both forecasts differ.
"""

from __future__ import annotations

import statistics
from typing import Any

from decentral.errors import ConfigError
from decentral.manifest import Manifest
from decentral.simulate.by_rounds.besides import besides
from decentral.simulate.by_rounds.gossip import Gossiping
from decentral.simulate.by_rounds.swarm import Rounds
from decentral.simulate.foreseen.round_time import body_of
from decentral.simulate.scenario import Scenario
from decentral.simulate.world import Progress

__all__ = ["check_by_rounds", "forecast_by_rounds", "is_by_rounds"]

PROFILES_OF = {  # where it was held against the other forecast; elsewhere what comes of lost messages decides
    "gather": ("lab", "home", "spot", "cliff", "even"),
    "reduce": ("lab", "spot", "even"),
    "pair": ("lab", "even"),
}


def is_by_rounds(manifest: Manifest, profile: str) -> bool:
    """Whether there is such a forecast for these terms and machines."""
    has_pace = manifest.inner.pace not in (None, "equal")
    return profile in PROFILES_OF[manifest.exchange.kind] and not has_pace


def check_by_rounds(manifest: Manifest, profile: str, *, learn: bool) -> None:
    """Raise ConfigError where there is none, and of what is learnt."""
    if learn:
        raise ConfigError("--by rounds trains no model; --learn wants --by messages")
    if not is_by_rounds(manifest, profile):
        kind, known = manifest.exchange.kind, ", ".join(PROFILES_OF[manifest.exchange.kind])
        raise ConfigError(
            f"--by rounds: a {kind} is reckoned so on {known}, and with equal steps of all; use --by messages"
        )


def forecast_by_rounds(scenario: Scenario, num_parameters: int, on_progress: Progress) -> dict[str, Any]:
    """Plain JSON, as ``decentral simulate --by rounds`` prints it."""
    manifest = scenario.manifest
    nbytes = body_of(manifest, num_parameters, scenario.hosts)
    gossips = manifest.exchange.kind == "pair"
    swarm = (Gossiping if gossips else Rounds)(scenario, nbytes)
    told = swarm.run(on_progress)
    seconds, machines = max(told.times, default=0.0), swarm.machines
    more = besides(scenario, told, num_parameters, nbytes, machines)
    pairs = {"pairs": told.named.count(2), "unpaired": told.named.count(1)} if gossips else {}
    return {
        "rounds": told.reached,
        "commits": 0 if gossips else len(told.times),
        "contributors": 0.0 if gossips else round(statistics.fmean(told.named or [0]), 2),
        **pairs,
        "bytes_per_peer": round(max(machine.nbytes for machine in machines) + more),
        "utilisation": round(statistics.fmean(machine.utilisation(seconds) for machine in machines), 4),
        "seconds": round(seconds, 3),
        "seconds_per_round": told.seconds_per_round,
        "parameters": num_parameters,
    }
