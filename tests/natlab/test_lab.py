"""What the lab promises of itself: nothing gets out, and nothing is left, however it ends."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.natlab.lab import Lab
from tests.natlab.namespaces import LabError
from tests.natlab.nat import PORT_PRESERVING
from tests.natlab.probes import Ear
from tests.natlab.scenarios import TABLE, Scenario
from tests.natlab.stage import Stage

BUILD = """
import json, signal, subprocess, sys, time
from tests.natlab.lab import Lab
from tests.natlab.nat import PORT_PRESERVING
from tests.natlab.wires import Line

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that a shell began in the background ignore it
with Lab() as lab:
    home = lab.household("home", PORT_PRESERVING, Line(up=10, delay=0.01))
    process = home.host("alice").start("sleep", "1000")
    print(json.dumps([process.pid, home.wire.process.pid]), flush=True)
    if sys.argv[1] == "fail":
        raise RuntimeError("in the middle")
    sys.stdin.read()
"""


def _interfaces() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def test_nothing_of_it_is_in_the_machines_own_network(lab: Lab) -> None:
    before = _interfaces()
    home = lab.household("home", PORT_PRESERVING)
    alice = home.host("alice")
    assert _interfaces() == before
    for namespace in (lab.core, home.gateway, alice):
        routes = json.loads(namespace.run("ip", "-j", "route"))
        assert {route.get("gateway", "45.67.0.0")[:3] for route in routes} <= {"45.", "10."}
    with lab.core.socket() as outside, pytest.raises(OSError, match="Network is unreachable"):
        outside.sendto(b"?", ("192.0.2.1", 53))


def test_a_command_that_fails_is_one_line_with_its_reason(lab: Lab) -> None:
    with pytest.raises(LabError, match=r"core: ip -batch - failed: .*nowhere") as caught:
        lab.core.ip("link set nowhere up")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("end", ["SIGKILL", "SIGINT", "fail"])
def test_whatever_ends_the_builder_ends_all_it_started(lab: Lab, end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUILD, end], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as builder:
        assert builder.stdout is not None
        pids = json.loads(builder.stdout.readline())
        watched = [os.pidfd_open(pid) for pid in pids]
        if end != "fail":
            builder.send_signal({"SIGKILL": 9, "SIGINT": 2}[end])
        for descriptor in watched:
            assert select.select([descriptor], [], [], 15)[0], "a process outlives the lab"
            os.close(descriptor)


# ---- every scenario can be built, and what goes wrong in it does ----


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
