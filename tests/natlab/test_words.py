"""Words on a home network: host and guest meet by multicast DNS, without a relay and without the internet."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

import anyio
import pytest

from decentral.errors import NoPeersError
from decentral.swarm.invite import Invite
from decentral.swarm.meeting import find_invite, host_words
from decentral.swarm.words import SpokenCode
from tests.natlab.lab import Lab
from tests.natlab.nat import PORT_PRESERVING

CODE = SpokenCode(("acid", "cargo", "mural", "tulip"), 4711)
INVITE = str(Invite(bytes(32), (), "a-secret-token"))
PATIENCE = 30.0  # s; it takes 2


def test_words_are_exchanged_at_home_and_nobody_next_door_hears_of_it(lab: Lab, away: Any) -> None:
    home, next_door = lab.household("home", PORT_PRESERVING), lab.household("next door", PORT_PRESERVING)
    alice, bob, eve = home.host("alice"), home.host("bob"), next_door.host("eve")
    told: Future[list[str]] = Future()
    hosts = away(alice, anyio.run, partial(host_words, CODE, INVITE, (), seconds=PATIENCE, ready=told.set_result))
    assert told.result(PATIENCE) == ["this network"]
    elsewhere = away(eve, anyio.run, partial(find_invite, CODE, (), seconds=3.0))
    with pytest.raises(NoPeersError):
        elsewhere.result(PATIENCE)
    assert str(away(bob, anyio.run, partial(find_invite, CODE, (), seconds=PATIENCE)).result(PATIENCE)) == INVITE
    assert len(hosts.result(PATIENCE)) == 32
