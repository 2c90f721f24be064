"""Every scenario can be built, and what goes wrong in it does."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.natlab.lab import Lab
from tests.natlab.probes import Ear
from tests.natlab.scenarios import TABLE, Scenario
from tests.natlab.stage import Stage

BY_NAME = {scenario.name: scenario for scenario in TABLE}


def _family(scenario: Scenario, name: str) -> socket.AddressFamily:
    families = next(seat.families for seat in scenario.seats if seat.name == name)
    return socket.AF_INET if 4 in families else socket.AF_INET6


@pytest.mark.parametrize("name", ["public", "carrier-grade", "same-home", "ipv6-only"])
def test_every_seat_reaches_the_public_one(lab: Lab, name: str, tmp_path: Path) -> None:
    stage = Stage(lab, BY_NAME[name], tmp_path)
    founder, *others = stage.hosts.values()
    for other in others:
        family = _family(BY_NAME[name], other.name)
        with Ear(founder, 7000, family) as there, Ear(other, 6000, family) as here:
            assert here.seen_by(there)[1] > 0
    assert stage.public(founder.name)


def test_seats_of_one_home_share_its_line(lab: Lab, tmp_path: Path) -> None:
    stage = Stage(lab, BY_NAME["same-home"], tmp_path)
    assert stage.hosts["alice"].number == stage.hosts["bob"].number
    assert len(stage.wires()) == 2


def test_a_cut_ends_with_the_losses_that_the_line_always_had(lab: Lab, tmp_path: Path) -> None:
    scenario = BY_NAME["public-line-dies"]
    stage = Stage(lab, scenario, tmp_path)
    assert scenario.trouble
    wire = stage.hosts[scenario.trouble.seat].wire
    stage.befall(scenario.trouble)
    assert wire.line.loss == 1.0
    stage.relieve(scenario.trouble)
    assert wire.line.loss == 0.0


def test_another_address_comes_to_the_household_of_the_seat(lab: Lab, tmp_path: Path) -> None:
    scenario = BY_NAME["address-changes"]
    stage = Stage(lab, scenario, tmp_path)
    assert scenario.trouble
    server, alice = stage.hosts["server"], stage.hosts["alice"]
    with Ear(server, 7000) as there, Ear(alice, 6000) as here:
        before = here.seen_by(there)
        stage.befall(scenario.trouble)
        stage.relieve(scenario.trouble)
        assert here.seen_by(there) != before
