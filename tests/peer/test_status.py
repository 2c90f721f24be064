"""Rounds that hang: the peer says since when, and what the round waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from decentral.consensus.chain import VOTING, Presence
from decentral.observe.health import health_sentence
from decentral.observe.status import Status, presence
from decentral.peer.status import (
    STEPS_ALONE,
    Balloting,
    OpenRound,
    StallWatch,
    _kind,
    _member,
    _open_round,
    _stages,
    _trains,
    why_open,
)
from decentral.training.reporting import Reporter
from decentral.wire.keys import peer_name

A, B, C, D = (bytes([n]) * 32 for n in range(4))
ALL = (A, B, C, D)


def name(peer: bytes) -> str:
    return "…" + peer_name(peer)[-6:]


OFFERED = {"offered": dict.fromkeys(ALL, 1), "arrived": ALL}
RATES, DECIDED = "0.0 kB/s come in and 0.0 kB/s go out", "it is decided, and nobody who was asked has"


def led(leader: bytes, number: int, **given: Any) -> Balloting:
    return Balloting(leader=leader, number=number, **given)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"present": (A, B), "min_peers": 3}, "more peers: it takes 3 (swarm.min_peers), and 2 are here"),
        ({"present": (A, B)}, f"{name(C)}, {name(D)}, who cannot be reached: a majority of 4 members has to vote"),
        ({"offered": {B: 1}}, "this peer's own loop: it has not made the inner steps of the round"),
        ({"offered": {A: 1, C: 1}}, f"{name(B)}, {name(D)}, who offered nothing"),
        ({"present": (A, B), "voters": (A, B, C), "offered": {A: 1}}, f"{name(B)}, who offered nothing"),
        (
            {"present": (A, B, D), "voters": (B, C)},
            f"{name(C)}, who cannot be reached: a majority of 2 members has to vote",
        ),
        ({"offerers": (B, C), "offered": {A: 1, C: 1}}, f"{name(B)}, who offered nothing"),
        (
            {"offered": dict.fromkeys(ALL, 2_000_000), "arrived": (A, C), "received_per_second": 1000.0},
            f"4.0 MB of {name(B)}, {name(D)}, and 1.0 kB/s come in and 0.0 kB/s go out: a line may be too thin",
        ),
        ({**OFFERED}, f"what the others lack: {RATES}"),
        ({"applying": True, "round": 8}, "this peer itself: what round 7 decided is not written or not applied yet"),
        ({"nowhere": (B,), "round": 7}, f"the frame of {name(B)} that round 7 names: {DECIDED} it"),
        ({"nowhere": (B, C), "round": 7}, f"the frames of {name(B)}, {name(C)} that round 7 names: {DECIDED} them"),
        ({"members": (B, C), "present": (B, C)}, "the members to let this peer in"),
        ({**OFFERED, "ballot": led(C, 3)}, f"{name(C)}, who leads ballot 3, to propose the round: {RATES}"),
        ({**OFFERED, "ballot": led(A, 3)}, f"what the others lack: {RATES}"),
        (
            {"ballot": led(A, 3, asked="votes", voters=ALL, given=(A, C), needed=3, proposed=True)},
            f"the votes of {name(B)}, {name(D)}: 2 of 3 are here, in ballot 3; {RATES}",
        ),
        (
            {"ballot": led(A, 3, asked="promises", voters=ALL, given=(A,), needed=3)},
            f"the promises of {name(B)}, {name(C)}, {name(D)}: 1 of 3 are here, in ballot 3; {RATES}",
        ),
        ({"ballot": led(C, 3, lacks=(D,), proposed=True)}, f"the frame of {name(D)} that the proposal names: {RATES}"),
        (
            {"ballot": led(C, 3, voted=True, proposed=True)},
            f"the votes that are told to {name(C)}, who leads ballot 3: this peer has voted; {RATES}",
        ),
        (
            {"ballot": led(A, 0, owners=(B, C))},
            f"the results of {name(B)}, {name(C)}, who sum their parts of the reduce: {RATES}",
        ),
    ],
)
def test_the_reason_is_the_first_thing_that_a_round_cannot_do_without(found: dict[str, Any], why: str) -> None:
    seen = OpenRound(**{"me": A, "members": ALL, "present": ALL, "min_peers": 1, **found})
    assert why_open(seen) == f"waiting for {why}"


def test_the_sentence_names_a_hang_in_a_peer_that_trains_on_and_in_one_that_waits() -> None:
    """Both looked healthy: with overlap training goes on, and without it every round waits."""
    why = "waiting for …abcdef, who offered nothing"
    stalled = {"stalled_seconds": 720.0, "stalled_by": why, "usual_round_seconds": 30.0}
    for state in ("training", "waiting"):
        assert health_sentence(Status(state=state, round=4, **stalled)) == (
            f"stalled: {why}; no round was made with others for 12 min, where one takes 30 s"
        )
    assert health_sentence(Status(state="paused", **stalled)).startswith("paused:")
    assert health_sentence(Status(state="waiting", wanted_members=2, **stalled)).startswith(
        "waiting: for a second peer"
    )


def test_gossip_in_which_nobody_pairs_with_a_peer_is_a_hang_although_its_steps_go_on() -> None:
    now = [0.0]
    reporter = Reporter(lambda kind, fields: None, b"me", lambda: now[0])
    node: Any = SimpleNamespace(
        ready=SimpleNamespace(is_set=lambda: True),
        gossip=object(),
        outer_steps=0,
        driver=SimpleNamespace(head=SimpleNamespace(final=False, round=1), membership=SimpleNamespace(stopping=False)),
    )
    stalls = StallWatch(lambda kind, fields: None)
    for partner in (B, *[None] * (STEPS_ALONE - 1)):
        now[0] += 10.0
        reporter.swap_ended(SimpleNamespace(step=0, partner=partner, disagreement=None, matched=True))  # type: ignore[arg-type]
        assert stalls.look(node, reporter.counters, 0.0) == (0.0, "")
    now[0] += 10.0
    reporter.swap_ended(SimpleNamespace(step=0, partner=None, disagreement=None, matched=True))  # type: ignore[arg-type]
    why = "waiting for a partner: the last 4 steps were taken alone"
    assert stalls.look(node, reporter.counters, 0.0) == (40.0, why)


# ---- the other members of its swarm ----

ME, OTHER, THIRD = b"m" * 32, b"o" * 32, b"t" * 32


def presence_of(member: bytes, live: dict[bytes, Any], said_goodbye: bool, *, done: bool = False) -> tuple[str, str]:
    directory = SimpleNamespace(live=lambda: live, left_politely=lambda peer: said_goodbye)
    directory.answer_seconds, directory.heard = {}, lambda peer: None
    paths, driver = (
        SimpleNamespace(get=lambda peer: None, look_soon=lambda: None),
        SimpleNamespace(state=SimpleNamespace(me=ME, running=True)),
    )
    node = SimpleNamespace(directory=directory, driver=driver, gossip=None, paths=paths, outer_steps=3)
    driver.machine = SimpleNamespace(
        state=SimpleNamespace(
            history=SimpleNamespace(outer_steps_at=lambda round_: 2), presence=SimpleNamespace(parts={})
        )
    )
    traffic = SimpleNamespace(of=lambda peer: SimpleNamespace(sent=0, received=0))
    part: Any = SimpleNamespace(
        settings=SimpleNamespace(options={"name": "Ben"}),
        swarm=SimpleNamespace(node=node, transport=SimpleNamespace(traffic=traffic)),
    )
    part.network = SimpleNamespace(is_private=False)
    told = _member(part, member, done=done)
    return presence(told), str(told["name"])


def test_a_member_that_said_goodbye_has_left_and_is_not_gone() -> None:
    """Until the record that drops it, it is a member still, and looked like one that was killed."""
    lease = SimpleNamespace(round=2, state=0, uplink=0, version="0.1.0/Anna")
    assert presence_of(OTHER, {OTHER: lease}, said_goodbye=False) == ("live", "Anna")
    assert presence_of(OTHER, {}, said_goodbye=False) == ("gone", "")
    assert presence_of(OTHER, {}, said_goodbye=True) == ("left", "")
    assert presence_of(ME, {}, said_goodbye=False) == ("live", "Ben")


def test_when_the_run_is_over_nobody_is_gone() -> None:
    """The same command again, after the end, got in touch with nobody and called all the others gone."""
    assert presence_of(OTHER, {}, said_goodbye=False, done=True) == ("left", "")


def test_the_round_in_progress_tells_its_offers_and_to_its_leader_the_votes() -> None:
    leading = SimpleNamespace(proposal=object(), votes={ME: b"", OTHER: b""})
    collected = SimpleNamespace(offers={ME: None}, opened=0.0)
    state = SimpleNamespace(acceptor=SimpleNamespace(promised=1), leading=leading, proposal=None, round=collected)
    state.leader_of, state.offerers = lambda ballot: (ME, OTHER)[ballot], (ME, OTHER, THIRD)
    state.presence, state.fragment = Presence(ME, VOTING, parts={THIRD: range(1, 2)}), 0  # which THIRD does not train
    head = SimpleNamespace(final=False, outer_step=7, members=(ME, OTHER))
    driver = SimpleNamespace(head=head, machine=SimpleNamespace(state=state))
    node: Any = SimpleNamespace(gossip=None, ready=SimpleNamespace(is_set=lambda: True), driver=driver)

    async def ask() -> dict[str, object] | None:
        return _open_round(node)

    told = anyio.run(ask)
    assert told is not None
    assert (told["round"], told["members"], told["offers"], told["votes"]) == (8, 2, 1, 2)
    assert (told["leader"], told["ballot"], told["proposed"]) == (peer_name(OTHER), 1, True)
    state.leading = None
    other = anyio.run(ask)
    assert other is not None
    assert (other["votes"], other["proposed"]) == (None, False), "votes go to the leader alone"
    head.final = True
    assert anyio.run(ask) is None


def test_kinds_of_messages_are_called_by_the_middle_of_their_protocol() -> None:
    called = {"/decentral/frame/1": "frame", "/decentral/state/2": "state", "other": "other"}
    assert {protocol: _kind(protocol) for protocol in called} == called


def test_the_stages_of_a_replica_say_which_of_them_each_waits_for() -> None:
    record = SimpleNamespace(members=(A, B, C), stages=((A, 0, 2), (B, 2, 3), (C, 3, 5)))
    inbox = SimpleNamespace(record=record, waiting={B: A, C: C})
    part: Any = SimpleNamespace(sharing=SimpleNamespace(inbox=inbox), identity=SimpleNamespace(peer=B))
    rows = _stages(part)
    assert [row["waits_for"] for row in rows] == [None, 0, None]
    assert [row["self"] for row in rows] == [False, True, False]
    status = Status(state="training", peer=peer_name(B), shares=True, stages=rows)
    assert "stage 2 of 3 and waits for stage 1" in health_sentence(status)
    inbox.waiting[B] = B
    assert health_sentence(Status(state="training", stages=_stages(part))).endswith("stage 2 of 3")
    part.sharing.inbox = None
    assert _stages(part) == ()


def test_before_its_rounds_run_a_peer_knows_of_nobody_what_it_trains() -> None:
    parts = {B: range(1, 3)}
    machine = SimpleNamespace(state=SimpleNamespace(presence=SimpleNamespace(parts=parts)))
    begun: Any = SimpleNamespace(driver=SimpleNamespace(state=SimpleNamespace(running=True), machine=machine))
    begins: Any = SimpleNamespace(driver=SimpleNamespace(state=SimpleNamespace(running=False)))
    assert (_trains(begun, B), _trains(begun, A), _trains(begins, B)) == ([1, 3], None, None)
