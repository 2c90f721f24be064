"""A scenario of a simulation: the terms of a run, how many machines, what befalls them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from decentral.consensus.chain import SEATS
from decentral.errors import ConfigError
from decentral.manifest import Manifest
from decentral.plugins import nearest
from decentral.simulate.lessons import LessonName, StandIn
from decentral.training.round_time import LATENCY

__all__ = ["PROFILES", "Profile", "Scenario", "on_lines", "profile_named"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A simulated run."""

    manifest: Manifest
    profile: Profile
    seed: int = 0
    hosts: int = 4
    rounds: int = 20  # outer steps under the profile, counted from the calm start's; then the swarm must come to rest
    step_seconds: float = 0.25  # of one inner step at the median speed
    arrivals: float = 0.0  # s over which the hosts come, one after the other; 0: all at once
    calm_start: bool = False  # nothing befalls the machines before all of them train together
    formed: float = 0.0  # share of those that share a replica of which one is formed before, after a calm start
    lesson: LessonName = "marks"  # what inner steps do
    patience: float = 5.0  # s of virtual time per outer step: a storm may keep a swarm from making any
    settle: float = 240.0  # s of virtual time that calm may take before it counts as a hang
    stand_in: StandIn | None = None  # what the small model's bytes stand for; None: for themselves
    seats: int = SEATS  # of the committee that votes where there are more hosts
    groups: int = 0  # replicas of ``stages`` hosts each, the last ones, which share them
    stages: int = 2
    spares: int = 0  # hosts beside them that share, too
    parts: int = 0  # hosts, the last ones, that train one fragment each, another one than the host before
    claims: tuple[float, ...] = ()  # bytes/s that hosts say they were seen to send, one of these; empty: nothing

    @property
    def round_seconds(self) -> float:
        """Seconds of virtual time that the median peer trains for one round."""
        return self.step_seconds * self.manifest.inner.steps


# ---- machines and links of volunteers ----
#
# What is drawn for each simulated peer, and how often things break.
#
# Sources of the figures: sessions of spot machines, SkyPilot's AWS V100 traces (1,884 sessions: Weibull k = 0.59, scale
# 1.78 h); sessions of home machines, KAD and IPFS measurements (Weibull k about 0.6, scale 3 h); the range of loss and
# duplication, TigerBeetle's simulator. The shares of stale and corrupt disks and the stragglers are proposals of ours.


@dataclass(frozen=True, slots=True)
class Profile:
    """Conditions that a swarm has to live with. Times in seconds, rates in bytes per second; shares between 0 and 1."""

    name: str
    crashes: float = 0.0  # share of peers that end per round of theirs, by a crash or a goodbye
    graceful: float = 0.2  # share of those that say goodbye
    power_cuts: float = 0.5  # share of crashes that cost what was not synced; the rest only kills the process
    away: float = 20.0  # median s until such a peer comes back
    returns: float = 0.9  # share that comes back at all
    new_identity: float = 0.1  # of those: with a new key and an empty disk
    stale_disk: float = 0.02  # of those: with the disk of some time before
    corrupt_disk: float = 0.01  # of those: with its newest checkpoint damaged
    partitions: float = 0.0  # chance per round that the network splits
    partition_for: float = 10.0  # median s of a split
    cliff_every: int = 0  # rounds between two events in which 50 to 100 % crash at once; 0: never
    loss: float = 0.0  # share of streams of which nothing arrives
    duplication: float = 0.0  # share of messages that arrive twice
    corruption: float = 0.0  # share of streams with a flipped bit
    delay: float = 0.0  # s, largest extra delay of a message: the cause of reordering
    sleeps: float = 0.0  # chance per round of a peer that it is suspended for a while
    latency: float = 0.080  # s, median one way; lognormal, sigma 0.6
    bandwidth: float = 2.5e6  # B/s, median downlink
    bandwidth_spread: float = 1.0  # sigma of its lognormal factor
    asymmetry: float = 5.0  # downlink / uplink
    speed_spread: float = 0.6  # sigma of the lognormal speed of peers
    jitter_spread: float = 0.25  # sigma of the lognormal factor of one round of one peer
    straggles: float = 0.02  # share of rounds that take a Pareto(1.3) factor of at most 50


_LAB = Profile("lab", crashes=0.001, latency=0.0005, bandwidth=125e6, asymmetry=1.0, speed_spread=0.1, straggles=0.0)
_HOME = Profile("home", crashes=0.07, partitions=0.002, loss=0.01, sleeps=0.01, delay=0.2)
_SPOT = Profile("spot", crashes=0.12, graceful=0.3, away=60.0, bandwidth=25e6, asymmetry=1.0, loss=0.002)
_EVEN = Profile(  # what arithmetic can foresee
    "even",
    latency=LATENCY,
    asymmetry=1.0,
    bandwidth_spread=0.0,
    speed_spread=0.0,
    jitter_spread=0.0,
    straggles=0.0,
)
_STORM = Profile(
    "storm",
    crashes=0.25,
    partitions=0.02,
    loss=0.1,
    duplication=0.2,
    corruption=0.02,
    delay=2.0,
    sleeps=0.02,
    stale_disk=0.1,
    corrupt_disk=0.1,
)

PROFILES = {
    profile.name: profile
    for profile in (_LAB, _HOME, _SPOT, _STORM, replace(_HOME, name="cliff", cliff_every=200), _EVEN)
}


def profile_named(name: str) -> Profile:
    """The profile of that name. ConfigError suggests the nearest one."""
    if name not in PROFILES:
        raise ConfigError(f"profile {name!r}: there is none; {nearest(name, list(PROFILES))}")
    return PROFILES[name]


def on_lines(profile: Profile, rate: float | None) -> Profile:
    """The profile's machines, all on the same line of ``rate`` bytes per second each way; None: on its own lines."""
    return profile if rate is None else replace(profile, bandwidth=rate, asymmetry=1.0, bandwidth_spread=0.0)
