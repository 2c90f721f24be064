"""Bytes that a peer sends besides frames: what is said about rounds, who is here, and what others missed."""

from __future__ import annotations

from collections.abc import Sequence

from decentral.simulate.by_rounds.absences import Absence
from decentral.simulate.by_rounds.machine import MachineModel
from decentral.simulate.by_rounds.told import StepTimes
from decentral.simulate.cost import of_directory, of_rounds
from decentral.simulate.scenario import Scenario
from decentral.wire.keys import Signer
from decentral.wire.messages import Lease, seal_lease

_SIGNER = Signer(bytes(32))
LEASE = seal_lease(
    Lease(bytes(32), _SIGNER.peer, 1, 15, ("/memory/" + "0" * 52,), 1, 1, bytes(32), 0, 1, "0.1.0"), _SIGNER
)
RENEWALS = 3  # in the life of a lease
SNAPSHOT = 3.34  # bytes per parameter, packed; see docs/cost.md


def besides(scenario: Scenario, told: StepTimes, numel: int, nbytes: float, spent: Sequence[MachineModel]) -> float:
    """Bytes of one of ``spent`` until the last outer step; ``nbytes``: of a frame, ``numel``: of the model."""
    n, kind, seconds = scenario.hosts, scenario.manifest.exchange.kind, max(told.times, default=0.0)
    directory = of_directory.renewal(n, LEASE).nbytes * RENEWALS * seconds / scenario.manifest.swarm.lease
    votes = 0.0 if kind == "pair" else of_rounds.control(kind, n, numel).nbytes * len(told.times)
    absences = [away for machine in spent for away in machine.been_away if away.end < seconds]
    return directory + votes + sum(_missed(away, told, numel, nbytes) for away in absences) / n


def _missed(away: Absence, told: StepTimes, numel: int, nbytes: float) -> float:
    """What the others send a machine that was away: the frames of the rounds since, or all of the model where that is
    less, or where it has forgotten all.
    """
    passed = sum(named for at, named in zip(told.times, told.named, strict=False) if away.begin < at < away.end)
    return SNAPSHOT * numel if away.forgets else min(SNAPSHOT * numel, passed * nbytes)
