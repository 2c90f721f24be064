"""What a peer of another version is told."""

from __future__ import annotations

import json

import pytest

from decentral.errors import NotAdmitted, VersionError
from decentral.swarm.hello import WIRE_VERSION, Hello, refusal

OLDER = {"wire": WIRE_VERSION - 1, "version": "0.0.9"}
SENTENCE = (
    rf"the peer speaks wire version {WIRE_VERSION - 1} \(decentral 0\.0\.9\), this is {WIRE_VERSION} \(decentral .*\); "
    r"install the same version: pip install decentral==0\.0\.9$"
)


@pytest.mark.parametrize(
    "said",
    [{"manifest": "", "schema": "", "age": 1.0}, {"refused": True}, {}],
    ids=["greets", "admits by token", "has fields that nobody here knows"],
)
def test_a_peer_of_an_older_wire_version_is_named_in_one_sentence_with_exit_code_21(said: dict[str, object]) -> None:
    with pytest.raises(VersionError, match=SENTENCE) as caught:
        Hello.from_bytes(json.dumps(OLDER | said).encode())
    assert caught.value.exit_code == 21


def test_a_refusal_of_this_version_asks_for_an_invite_of_today() -> None:
    with pytest.raises(NotAdmitted, match="ask a member for its invite of today"):
        Hello.from_bytes(refusal())
