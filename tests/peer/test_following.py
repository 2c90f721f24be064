"""A follower in a loop that does something else meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

import decentral
from decentral.errors import InviteError, NoPeersError, UsageError
from tests.kit.families import NOBODY
from tests.kit.patience import until
from tests.kit.problems import NET, Problem, joined, run_terms, train


def test_the_newest_anchor_is_there_without_waiting_for_the_next(tmp_path: Path) -> None:
    problem = Problem(0)
    with joined(run_terms("diloco"), problem, tmp_path / "a") as peer:
        with decentral.follow(peer.invite, out=tmp_path / "b", **NET) as anchors:
            until(lambda: anchors.latest() is not None)
            first = anchors.latest()
            assert first is anchors.latest(), "again, until there is a newer one"
            train(peer, problem, rounds=2)
            until(lambda: anchors.latest().round == 2)
            assert anchors.latest().digest == peer.anchor_digest
            train(peer, problem)
            until(lambda: anchors.latest().final)
            assert list(anchors) == [], "what was given is not given again"
        assert anchors.latest().final


def test_a_follower_names_its_relay_that_does_not_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        joined(run_terms("diloco"), Problem(0), tmp_path / "a") as peer,
        decentral.follow(peer.invite, out=tmp_path / "b", relays=[NOBODY], **NET) as anchors,
    ):
        until(lambda: anchors.silent_relays == ("127.0.0.1:1",))
        assert "relay 127.0.0.1:1 does not answer, looking on" in caplog.text
        next(anchors)


def test_nobody_there_is_said_by_the_look_too(tmp_path: Path) -> None:
    again = tmp_path / "b"
    with joined(run_terms("diloco"), Problem(0), tmp_path / "a") as peer:
        invite = peer.invite
        with decentral.follow(invite, out=again, **NET) as anchors:
            next(anchors)
    with decentral.follow(invite, out=again, join_timeout=0.5, **NET) as anchors, pytest.raises(NoPeersError):
        until(lambda: anchors.latest() is None and False)


@pytest.mark.parametrize(
    ("given", "error", "why"),
    [
        ({"invite": 3}, InviteError, "invite: a int is none; give the line that begins with decentral1:"),
        ({"invite": "x", "every": "2"}, UsageError, "every=2"),
        ({"invite": "x", "join_timeout": "3s"}, decentral.ConfigError, "join_timeout='3s'"),
    ],
)
def test_what_cannot_be_followed_is_one_sentence(given, error, why) -> None:
    with pytest.raises(error, match=why):
        decentral.follow(**given)
