"""What a peer says of the other members of its swarm."""

from types import SimpleNamespace
from typing import Any

import anyio

from decentral.observe.status import presence
from decentral.peer.status import _kind, _member, _open_round
from decentral.wire.keys import peer_name

ME, OTHER = b"m" * 32, b"o" * 32


def shown(live: dict[bytes, Any], said_goodbye: bool, *, done: bool = False) -> Any:
    directory = SimpleNamespace(live=lambda: live, said_goodbye=lambda peer: said_goodbye)
    directory.answered_in, directory.heard = {}, lambda peer: None
    paths, driver = SimpleNamespace(get=lambda peer: None, look_soon=lambda: None), SimpleNamespace(me=ME)
    node = SimpleNamespace(directory=directory, driver=driver, gossip=None, paths=paths, outer_steps=3)
    driver.machine = SimpleNamespace(state=SimpleNamespace(history=SimpleNamespace(outer_steps_at=lambda round_: 2)))
    traffic = SimpleNamespace(of=lambda peer: SimpleNamespace(sent=0, received=0))
    return SimpleNamespace(done=done, node=node, transport=SimpleNamespace(traffic=traffic))


def test_a_member_that_said_goodbye_has_left_and_is_not_gone() -> None:
    """Until the record that drops it, it is a member still, and looked like one that was killed."""
    lease = SimpleNamespace(round=2, state=0, uplink=0)
    assert presence(_member(shown({OTHER: lease}, said_goodbye=False), OTHER)) == "live"
    assert presence(_member(shown({}, said_goodbye=False), OTHER)) == "gone"
    assert presence(_member(shown({}, said_goodbye=True), OTHER)) == "left"
    assert presence(_member(shown({}, said_goodbye=False), ME)) == "live"


def test_when_the_run_is_over_nobody_is_gone() -> None:
    """The same command again, after the end, got in touch with nobody and called all the others gone."""
    assert presence(_member(shown({}, said_goodbye=False, done=True), OTHER)) == "left"


def test_the_round_in_progress_tells_its_offers_and_to_its_leader_the_votes() -> None:
    leading = SimpleNamespace(proposal=object(), votes={ME: b"", OTHER: b""})
    collected = SimpleNamespace(offers={ME: None}, opened=0.0)
    state = SimpleNamespace(acceptor=SimpleNamespace(promised=1), leading=leading, proposal=None, round=collected)
    state.leader_of, state.offerers = lambda ballot: (ME, OTHER)[ballot], (ME, OTHER)
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
    assert [_kind(protocol) for protocol in ("/decentral/frame/1", "/decentral/state/2", "other")] == [
        "frame",
        "state",
        "other",
    ]
