"""What the doctor says of the way to others, and what it tells to do."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from decentral.cli import main
from decentral.cli.checks import reachable, verdict
from decentral.swarm.invite import Invite
from decentral.transport.reachability import Reachability, View
from decentral.wire.keys import Signer, peer_name

LISTEN = ("/ip4/0.0.0.0/tcp/4001",)
VIEW = View(Signer(bytes(32)).peer, "/ip4/45.67.0.9/tcp/9", 9, answered=False, skew=0.0)


@pytest.mark.parametrize(
    ("kind", "relays_known", "grade", "words"),
    [
        ("public", False, "ok", ["public", "dialled back at /ip4/45.67.0.9/tcp/9"]),
        ("local", False, "ok", ["local", "nobody outside"]),
        ("nat", True, "ok", ["port-preserving NAT", "through relays", "forward TCP port 4001"]),
        ("nat", False, "warn", ["port-preserving NAT", "--relay", "decentral relay"]),
        ("symmetric nat", True, "ok", ["symmetric NAT", "through relays"]),
        ("symmetric nat", False, "warn", ["symmetric NAT", "--relay"]),
        ("firewall", True, "ok", ["firewall", "open TCP port 4001"]),
        ("unknown", False, "warn", ["nobody could say", "--relay"]),
    ],
)
def test_every_verdict_says_what_was_found_and_what_to_do(kind, relays_known, grade, words):
    found = verdict(Reachability(kind, LISTEN, (VIEW,)), relays_known=relays_known)
    assert found.verdict == grade
    assert [word for word in words if word not in found.detail] == []
    assert "\n" not in found.detail


def test_an_invite_that_nobody_answers_is_not_asked_for_again():
    nowhere = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_name(VIEW.peer)}"  # nothing listens there
    for relays, invite, whom in (
        ((), str(Invite(bytes(32), (nowhere,))), "the invite's addresses"),
        ((nowhere,), None, "the addresses at --relay"),
    ):
        (finding,) = reachable(("/ip4/127.0.0.1/tcp/0",), relays, invite)
        assert finding.verdict == "warn"
        assert f"nobody at {whom} answered; is somebody up there" in finding.detail
        assert "fresh invite" in finding.detail
        assert "give an invite" not in finding.detail


def test_without_anybody_to_ask_it_says_so_and_takes_no_time():
    (finding,) = reachable(("/ip4/127.0.0.1/tcp/0",), (), None)
    assert finding.verdict == "warn"
    assert "give an invite, or --relay ADDR" in finding.detail


def test_what_is_no_relay_is_one_line():
    result = CliRunner().invoke(
        main, ["doctor", "--json", "--listen", "/ip4/127.0.0.1/tcp/0", "--relay", "/ip4/127.0.0.1/tcp/1/p2p/nonsense"]
    )
    findings = {finding["what"]: finding for finding in json.loads(result.stdout)}
    assert findings["reached"]["verdict"] == "fail"
    assert "decentral relay prints it" in findings["reached"]["detail"]
