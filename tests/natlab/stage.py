"""A scenario's places as namespaces, and the troubles that befall them."""

from __future__ import annotations

from pathlib import Path

from tests.natlab.lab import Host, Household, Lab
from tests.natlab.relay import RelaySeat
from tests.natlab.scenarios import Scenario, Seat, Trouble
from tests.natlab.wires import Wire


class Stage:
    """Every seat of a scenario as a host of the lab."""

    def __init__(self, lab: Lab, scenario: Scenario, folder: Path) -> None:
        self.lab, self.scenario = lab, scenario
        self._homes: dict[str, Household] = {}
        self.hosts: dict[str, Host] = {seat.name: self._settle(seat) for seat in scenario.seats}
        self.relay: RelaySeat | None = None
        if scenario.relay is not None:
            self.relay = RelaySeat(lab.public("relay", scenario.relay), folder / "relay")

    def public(self, name: str) -> bool:
        """Whether others can dial this seat."""
        return next(seat for seat in self.scenario.seats if seat.name == name).nat is None

    def wires(self) -> dict[int, Wire]:
        """The line of each household."""
        return {host.number: host.wire for host in self.hosts.values()}

    def befall(self, trouble: Trouble) -> None:
        """Let it begin."""
        if trouble.kind == "kill relay":
            assert self.relay is not None, "the scenario has one"
            self.relay.kill()
        elif trouble.kind == "cut":
            self.hosts[trouble.seat].wire.cut()
        else:
            self._homes[trouble.seat].renumber()

    def relieve(self, trouble: Trouble) -> None:
        """Let it end, if it is of the kind that does."""
        if trouble.kind == "kill relay":
            assert self.relay is not None, "the scenario has one"
            self.relay.start()
        elif trouble.kind == "cut":
            wire = self.hosts[trouble.seat].wire
            wire.mend(next(seat.line.loss for seat in self.scenario.seats if seat.name == trouble.seat))

    def _settle(self, seat: Seat) -> Host:
        if seat.nat is None:
            return self.lab.public(seat.name, seat.line, seat.families)
        home = seat.home or seat.name
        if home not in self._homes:
            self._homes[home] = self.lab.household(home, seat.nat, seat.line, seat.families, seat.carrier)
        return self._homes[home].host(seat.name)
