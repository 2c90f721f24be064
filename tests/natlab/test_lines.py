"""Are lines as fast, as slow and as bad as they are said to be?"""

from __future__ import annotations

import pytest

from tests.natlab.flows import between
from tests.natlab.lab import Host, Lab
from tests.natlab.namespaces import LabError
from tests.natlab.nat import PORT_PRESERVING
from tests.natlab.probes import Ear, megabits, one_way
from tests.natlab.wires import Line


@pytest.mark.parametrize("delay", [0.0, 0.0125], ids=["veth", "with delay"])
def test_a_line_carries_its_rate_each_way_within_a_tenth(lab: Lab, delay: float) -> None:
    fast = lab.public("server")
    slow = lab.public("volunteer", Line(up=10, down=40, delay=delay))
    assert fast.v4
    assert slow.v4
    assert carried(slow, fast, (fast.v4, 80), 1.0, 10) == pytest.approx(10, rel=0.1)
    assert carried(fast, slow, (slow.v4, 80), 0.8, 40) == pytest.approx(40, rel=0.1)


def carried(sender: Host, receiver: Host, to: tuple[str, int], seconds: float, rate: float) -> float:
    """Mbit/s, measured up to eight times while it is too low: a busy machine slows a line, and never hastens it."""
    for _ in range(8):
        found = megabits(sender, receiver, to, seconds)
        if found >= 0.9 * rate:
            break
    return found


@pytest.mark.parametrize("delay", [0.005, 0.05])
def test_a_line_delays_each_way_within_a_tenth(lab: Lab, delay: float) -> None:
    near, far = lab.public("near"), lab.public("far", Line(delay=delay))
    with Ear(near, 7000) as here, Ear(far, 7000) as there:
        assert one_way(here, there) == pytest.approx(delay, rel=0.1)
        assert one_way(there, here) == pytest.approx(delay, rel=0.1)


def test_a_line_in_use_becomes_another(lab: Lab) -> None:
    near, far = lab.public("near"), lab.public("far", Line(up=10, down=10, delay=0.05))
    with Ear(near, 7000) as here, Ear(far, 7000) as there:
        assert one_way(here, there) == pytest.approx(0.05, rel=0.1)
        far.wire.become(Line(up=40, down=20, delay=0.01))
        assert one_way(here, there) == pytest.approx(0.01, rel=0.1)
        assert one_way(there, here) == pytest.approx(0.01, rel=0.1)
    assert near.v4
    assert carried(far, near, (near.v4, 80), 0.8, 40) == pytest.approx(40, rel=0.1)
    far.wire.become(Line(up=10, down=10, delay=0.01))
    assert carried(far, near, (near.v4, 80), 1.0, 10) == pytest.approx(10, rel=0.1)


def test_a_line_made_without_a_delay_is_given_none(lab: Lab) -> None:
    with pytest.raises(LabError, match="cannot be given one"):
        lab.public("far").wire.delay(0.01)


def test_a_jitter_makes_some_packets_later_than_others_and_keeps_their_order(lab: Lab) -> None:
    near, far = lab.public("near"), lab.public("far", Line(delay=0.01, jitter=0.03))
    with Ear(near, 7000) as here, Ear(far, 7000) as there:
        took = [one_way(here, there, tries=1) for _ in range(60)]  # over one stretch of the same jitter or more
        assert min(took) >= 0.009
        assert min(took) + 0.005 < max(took)
        for number in range(150):
            here.say(b"%d" % number, there.address)
        assert [there.hear()[0] for _ in range(150)] == [b"%d" % number for number in range(150)]


def test_the_delay_keeps_the_order_and_loses_nothing(lab: Lab) -> None:
    near, far = lab.public("near"), lab.public("far", Line(delay=0.01))
    with Ear(near, 7000) as here, Ear(far, 7000) as there:
        for number in range(150):
            here.say(b"%d" % number, there.address)
        assert [there.hear()[0] for _ in range(150)] == [b"%d" % number for number in range(150)]


def test_a_line_loses_its_share_each_way(lab: Lab) -> None:
    near, far = lab.public("near"), lab.public("far", Line(loss=0.2))
    with Ear(near, 7000) as here, Ear(far, 7000) as there:
        for sender, receiver in ((here, there), (there, here)):
            for _ in range(10):
                for _ in range(100):
                    sender.say(b"x", receiver.address)
                _drain(receiver)
    flows = lab.flows()
    for way in ((near.number, far.number), (far.number, near.number)):
        arrived = flows[*way, "udp"] / 29  # bytes of such a packet
        assert arrived == pytest.approx(800, abs=64)  # five standard deviations


def test_a_cut_line_says_nothing_and_works_again_once_mended(lab: Lab) -> None:
    near, far = lab.public("near"), lab.public("far")
    with Ear(near, 7000) as here, Ear(far, 7000) as there:
        far.wire.cut()
        here.say(b"lost", there.address)
        there.say(b"lost", here.address)
        far.wire.mend()
        here.say(b"there", there.address)
        assert there.hear()[0] == b"there"
        there.say(b"and back", here.address)
        assert here.hear()[0] == b"and back"


@pytest.mark.parametrize("delay", [0.0, 0.005], ids=["veth", "with delay"])
def test_a_household_that_gets_another_address_is_reached_by_no_old_mapping(lab: Lab, delay: float) -> None:
    home = lab.household("home", PORT_PRESERVING, Line(delay=delay))
    with Ear(lab.public("server"), 7000) as server, Ear(home.host("alice"), 6000) as alice:
        old = alice.seen_by(server)
        new = home.renumber()
        server.say(b"to the old address", old)
        assert alice.seen_by(server) == (new, 6000) != old
        server.say(b"to the new one", (new, 6000))
        assert alice.hear()[0] == b"to the new one"


def test_flows_are_booked_to_the_households_behind_the_translation(lab: Lab) -> None:
    server, home = lab.public("server"), lab.household("home", PORT_PRESERVING)
    with Ear(server, 7000) as ear, Ear(home.host("alice"), 6000) as alice:
        alice.say(bytes(100), ear.address)
        ear.hear()
    flows = lab.flows()
    assert +flows == {(home.number, server.number, "udp"): 128}
    assert between(flows, [home.number], [server.number]) == 128


def test_what_stays_at_home_is_booked_there(lab: Lab) -> None:
    home = lab.household("home", PORT_PRESERVING)
    with Ear(home.host("alice"), 6000) as alice, Ear(home.host("bob"), 6000) as bob:
        alice.say(bytes(100), bob.address)
        bob.hear()
    assert +lab.flows() == {(home.number, home.number, "home"): 128}


def _drain(ear: Ear) -> None:
    ear.socket.setblocking(False)
    try:
        while True:
            ear.hear()
    except BlockingIOError:
        ear.socket.settimeout(5.0)
