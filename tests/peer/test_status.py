"""What a peer says of the other members of its swarm."""

from types import SimpleNamespace
from typing import Any

from decentral.observe.status import presence
from decentral.peer.shown.status import _member

ME, OTHER = b"m" * 32, b"o" * 32


def shown(live: dict[bytes, Any], said_goodbye: bool, *, done: bool = False) -> Any:
    directory = SimpleNamespace(live=lambda: live, said_goodbye=lambda peer: said_goodbye, answered_in={})
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
