"""What a peer of another version is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch

from decentral.errors import NotAdmitted, VersionError
from decentral.manifest import preset_manifest
from decentral.parameters import schema_of
from decentral.swarm.hello import HELLO, WIRE_VERSION, Hello, check_version, greeting, refusal
from decentral.transport.memory import MemoryNetwork
from decentral.transport.requests import serve_requests
from decentral.wire.keys import Signer
from tests.kit.scenes import without_waiting

OLDER = {"wire": WIRE_VERSION - 1, "version": "0.0.9"}
SENTENCE = (
    rf"the peer speaks wire version {WIRE_VERSION - 1} \(decentral 0\.0\.9\), this is {WIRE_VERSION} \(decentral .*\); "
    r"install decentral 0\.0\.9, or ask who gave you the invite for theirs$"
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


# ---- test same version ----
#
# A peer that comes back asks those that are here whether it still speaks their version.

OURS = greeting(preset_manifest("diloco"), schema_of(torch.nn.Linear(2, 2), 1), 1.0)
THEIRS = json.dumps({"wire": WIRE_VERSION + 1, "version": "0.2.0"}).encode()
SILENT, NONSENSE = b"", b"no greeting"


def come_back(answers: Sequence[bytes]) -> float:
    """To peers that answer so, one after the other; the simulated seconds that it took."""

    async def script() -> float:
        network = MemoryNetwork()
        me = network.transport(Signer(bytes([99]) * 32))
        live: dict[bytes, Any] = {}
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(me)
            for number, answer in enumerate(answers):
                other = network.transport(Signer(bytes([number]) * 32))

                async def say(peer: bytes, body: bytes, answer: bytes = answer) -> bytes:
                    return answer

                serve_requests(other, HELLO, say, limit=1000)
                await stack.enter_async_context(other)
                await me.connect(other.peer, other.addresses())
                live[other.peer] = None
            directory: Any = SimpleNamespace(transport=me, live=lambda: live)
            began = anyio.current_time()
            with anyio.move_on_after(60):
                await check_version(directory, None)
            return anyio.current_time() - began

    return without_waiting(script)


@pytest.mark.parametrize("answers", [[OURS], [THEIRS, OURS], [NONSENSE, OURS], [THEIRS, NONSENSE, OURS]])
def test_one_that_speaks_our_version_is_enough_whatever_others_say(answers: list[bytes]) -> None:
    assert come_back(answers) < 10


@pytest.mark.parametrize("answers", [[THEIRS], [THEIRS, THEIRS], [NONSENSE, THEIRS]])
def test_where_all_who_answer_speak_another_one_it_goes_with_one_sentence(answers: list[bytes]) -> None:
    with pytest.raises(
        VersionError, match=r"the peer speaks wire version \d+ \(decentral 0\.2\.0\), this is"
    ) as caught:
        come_back(answers)
    assert caught.value.exit_code == 21
    assert "install decentral 0.2.0" in str(caught.value)


@pytest.mark.parametrize("answers", [[], [NONSENSE], [NONSENSE] * 5])
def test_while_nobody_says_anything_it_stays(answers: list[bytes]) -> None:
    assert come_back(answers) >= 60
