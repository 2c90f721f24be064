"""tests/observe/test_screen.py"""

import io
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from decentral.observe.beacon import Beacon
from decentral.observe.health import alone_sentence
from decentral.observe.requests import Request, ask
from decentral.observe.screen import (
    HINT_SECONDS,
    LateDisplay,
    LiveDisplay,
    PlainDisplay,
    log_shown_by,
    open_display,
    render,
)
from decentral.observe.status import Status, read_status
from tests.kit.patience import PATIENCE, until


class Opened:
    def __init__(self) -> None:
        self.shown: list[str] = []

    def show(self, status: Status) -> None:
        self.shown.append(status.state)

    def say(self, text: str) -> None:
        self.shown.append(text)

    result = say

    def close(self) -> None:
        self.shown.append("closed")


def late() -> tuple[LateDisplay, io.StringIO, Opened, list[float]]:
    stream, opened, now = io.StringIO(), Opened(), [100.0]
    return LateDisplay(stream, lambda: opened, monotonic=lambda: now[0]), stream, opened, now


def test_of_a_run_that_is_over_only_its_end_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    display, stream, opened, _ = late()
    for state in ("starting", "syncing", "starting", "done"):
        display.show(Status(state=state))
    display.say("This run is over: decentral export out --to model/")
    display.result("decentral join INVITE")
    display.close()
    assert stream.getvalue() == "This run is over: decentral export out --to model/\n"
    assert capsys.readouterr().out == "decentral join INVITE\n"
    assert opened.shown == []


def test_fetching_that_takes_long_is_said_once() -> None:
    display, stream, _, now = late()
    for _ in range(5):
        now[0] += HINT_SECONDS / 2
        display.show(Status(state="syncing"))
    assert stream.getvalue() == "the run is over: fetching its last state ...\n"


@pytest.mark.parametrize(
    "found", [{"state": "training"}, {"state": "looking"}, {"state": "syncing", "problem": "disk"}]
)
def test_a_run_that_goes_on_after_all_is_shown_as_any_other(found: dict[str, Any]) -> None:
    display, stream, opened, _ = late()
    display.show(Status(state="starting"))
    display.show(Status(**found))
    display.say("a line")
    display.show(Status(state="done"))
    display.close()
    assert opened.shown == [found["state"], "a line", "done", "closed"]
    assert stream.getvalue() == ""


LOG = logging.getLogger("decentral.peer")


def said(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()[1:]  # without how to stop


def test_what_the_library_warns_of_is_a_line_of_the_display_while_it_is_there() -> None:
    stream = io.StringIO()
    with log_shown_by(PlainDisplay(stream, stop="Ctrl-C").say):
        logging.addLevelName(logging.WARNING, "WARN")  # as hivemind does
        LOG.warning("%d rounds passed by", 3)
        logging.addLevelName(logging.WARNING, "WARNING")
        LOG.info("not this")
        logging.getLogger("another").warning("nor this")
    LOG.warning("nor what comes after")
    assert said(stream) == ["warning: 3 rounds passed by"]


def test_a_word_of_a_peer_cannot_steer_the_terminal() -> None:
    stream = io.StringIO()
    with log_shown_by(PlainDisplay(stream, stop="Ctrl-C").say):
        LOG.warning("it says %s", "\x1b[2Jhello\rthere\u202e")
    assert "\x1b" not in stream.getvalue()
    assert "".join(said(stream)).endswith("there?")


def test_a_traceback_is_told_line_by_line() -> None:
    stream = io.StringIO()
    with log_shown_by(PlainDisplay(stream, stop="Ctrl-C").say):
        try:
            raise ValueError("a bug")
        except ValueError:
            LOG.exception("handler failed")
    assert said(stream)[0] == "error: handler failed"
    assert said(stream)[-1] == "ValueError: a bug"


def test_the_status_does_not_say_again_what_was_logged_just_now() -> None:
    stream, now = io.StringIO(), [0.0]
    display = PlainDisplay(stream, stop="Ctrl-C", monotonic=lambda: now[0])
    gone = Status(state="looking", gone=("aaa",), gone_left=True, inner_steps=83)
    with log_shown_by(display.say):
        LOG.warning(alone_sentence(["aaa"], left=True))
        display.show(gone)
    assert said(stream) == ["warning: alone: aaa left; the invite still lets others in"]
    now[0] += 20.0
    display.show(Status(state="training"))
    display.show(gone)
    assert said(stream)[-1].startswith("alone: aaa left; the invite still lets others in; training on alone")


def test_a_peer_that_waits_for_others_says_so_again_every_half_minute() -> None:
    stream, now = io.StringIO(), [0.0]
    display = PlainDisplay(stream, stop="Ctrl-C", monotonic=lambda: now[0])
    for _ in range(91):
        display.show(Status(state="waiting", wanted_members=2, own_loop=True))
        now[0] += 1.0
    sentence = "waiting: for a second peer, who joins with the invite; decentral.join(alone=True), or"
    assert [line.split(sentence)[0] for line in said(stream)] == ["", "still ", "still ", "still "]


STOP = "Ctrl-C, or decentral leave --out here"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain_lines(*statuses: Status, prefix: str = "") -> list[str]:
    """What a plain display says of them, a second apart."""
    stream, clock = io.StringIO(), Clock()
    display = PlainDisplay(stream, stop=STOP, prefix=prefix, monotonic=clock)
    for status in statuses:
        display.show(status)
        clock.now += 1
    return stream.getvalue().splitlines()


def test_a_plain_display_says_how_to_stop_the_state_and_then_a_short_line_per_round() -> None:
    members = ({"peer": "a"}, {"peer": "b"})
    rounds = [Status(state="training", round=i, rounds=9, members=members, loss=2.5) for i in (0, 0, 1, 1, 2)]
    assert plain_lines(*rounds) == [
        f"to stop: {STOP}",
        "healthy: round 0, no round has ended yet",
        "round 1 of 9, loss 2.5000, 2 peers, 0.0 kB sent",
        "round 2 of 9, loss 2.5000, 2 peers, 0.0 kB sent",
    ]


def test_a_state_is_said_when_it_changes_and_not_in_every_round() -> None:
    states = ["looking", "looking", "looking", "training", "training", "looking"]
    words = [
        line.split(":")[0].split(",")[0]
        for line in plain_lines(*(Status(state=s, round=i) for i, s in enumerate(states)))
    ]
    assert words == ["to stop", "looking", "round 1", "round 2", "healthy", "round 4", "looking"]


def test_waiting_in_every_round_does_not_say_healthy_in_every_round() -> None:
    told = [("training", 0), ("waiting", 0), ("training", 1), ("waiting", 1), ("training", 2)]
    words = [line.split(":")[0].split(",")[0] for line in plain_lines(*(Status(state=s, round=r) for s, r in told))]
    assert words == ["to stop", "healthy", "waiting", "round 1", "waiting", "round 2"]


def test_beside_a_script_each_line_says_who_speaks() -> None:
    lines = plain_lines(Status(state="training"), Status(state="training", round=1), prefix="decentral: ")
    assert len(lines) == 3
    assert all(line.startswith("decentral: ") for line in lines)


def test_a_plain_display_is_never_silent_for_long_and_repeats_no_advice() -> None:
    looking = [Status(state="looking", inner_steps=i) for i in range(62)]
    lines = plain_lines(*looking)
    assert lines[1].startswith("looking: nobody reachable")
    assert lines[2:] == [f"still looking: round 0, inner step {step}" for step in (30, 60)]


def test_a_file_gets_plain_lines_and_no_escape_codes() -> None:
    stream = io.StringIO()
    display = open_display(stream, stop=STOP)
    display.show(Status(state="training"))
    display.close()
    assert isinstance(display, PlainDisplay)
    assert "\x1b" not in stream.getvalue()


def live_text(console: Console) -> str:
    display = LiveDisplay(console, stop=STOP)
    members = tuple(
        {"peer": f"12D3KooW{i:06}", "live": i not in (2, 3), "left": i == 3, "round": None if i in (2, 3) else 3}
        for i in range(20)
    )
    known = {"loss": 2.5, "held_out_loss": 2.75, "seconds_left": 600.0}
    display.show(Status(state="training", round=3, members=members, peer="12D3KooW000001", **known))
    display.close()
    stream = console.file
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


def test_a_terminal_gets_the_sentence_the_numbers_the_members_and_how_to_stop() -> None:
    text = live_text(Console(file=io.StringIO(), force_terminal=True, width=120, height=50))
    for part in ("healthy: round 3", "2.5000", "2.7500", "10 min", "and 8 more", f"to stop: {STOP}"):
        assert part in text


def test_the_state_of_every_member_is_told() -> None:
    text = live_text(Console(file=io.StringIO(), force_terminal=True, width=120, height=50))
    rows = [line.split() for line in text.splitlines() if "…0000" in line]
    assert rows[:4] == [
        ["…000000", "live", "3", "-"],
        ["…000001", "(you)", "training", "3", "-"],
        ["…000002", "gone", "-", "-"],
        ["…000003", "left", "-", "-"],
    ]


def test_names_stand_beside_letters_in_both_views_and_steer_no_terminal() -> None:
    one, other = (f"12D3KooW{letter * 6}" for letter in "AB")
    status = Status(
        state="waiting",
        peer=one,
        members=({"peer": one}, {"peer": other, "live": True}),
        waiting_for=(other,),
        names={one: "Ben", other: "Anna", f"12D3KooW{'C' * 6}": "\x1b[2J"},
    )
    console, stream = Console(file=io.StringIO(), force_terminal=True, width=120, height=50), io.StringIO()
    for display in (LiveDisplay(console, stop=STOP), PlainDisplay(stream, stop=STOP)):
        display.show(status)
        with log_shown_by(display.say):
            LOG.warning("…BBBBBB and …CCCCCC send much")
        display.close()
    assert isinstance(console.file, io.StringIO)
    live, plain = console.file.getvalue(), stream.getvalue()
    assert "Ben (AAAAAA) (you)" in live
    for text in (live, plain):
        assert "round 1 needs Anna (BBBBBB)" in text
        assert "warning: Anna (BBBBBB) and …CCCCCC send much" in text
    assert "[2J" not in live + plain


def test_no_color_leaves_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in live_text(Console(file=io.StringIO(), force_terminal=True, width=120))
    monkeypatch.delenv("NO_COLOR")
    coloured = Console(file=io.StringIO(), force_terminal=True, width=120, color_system="standard")
    assert "\x1b[32m" in live_text(coloured)


def test_how_to_stop_is_the_last_line_of_the_live_view() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(render(Status(state="paused"), STOP, rows=24))
    assert console.file.getvalue().rstrip().splitlines()[-1] == f"to stop: {STOP}"  # type: ignore[attr-defined]


def test_the_beacon_publishes_hears_requests_and_leaves_a_last_word(tmp_path: Path) -> None:
    heard, status = [], Status(state="training", round=1)
    paused = threading.Event()

    def on_request(request: Request) -> None:
        heard.append(request.name)
        paused.set()

    ask(tmp_path, "leave")  # meant for an earlier process: must not reach this one
    display = PlainDisplay(io.StringIO(), stop=STOP)
    with Beacon(tmp_path, lambda: status, on_request, display=display, period=0.01):
        assert read_status(tmp_path).health.startswith("healthy: round 1")
        ask(tmp_path, "pause")
        assert paused.wait(PATIENCE)
        status = replace(status, state="done")
    assert heard == ["pause"]
    assert read_status(tmp_path).state == "done"


def test_a_peer_that_rests_writes_its_status_at_a_slower_pace_and_what_it_is_asked_at_once(tmp_path: Path) -> None:
    now, round_, more = 0.0, 0, {}  # as the swarm goes on

    def read() -> Status:
        return Status(state="paused", round=round_, **more)

    beacon, found = Beacon(tmp_path, read, print, clock=lambda: now), []
    for now in range(1, 22):
        round_, more = now, {"max_upload": 1e6} if now > 14 else {}
        beacon.publish()
        found.append(read_status(tmp_path).round)
    assert sorted(set(found)) == [1, 11, 15]
    assert read_status(tmp_path).written_every == 10.0  # so that no reader calls it frozen


def test_a_full_disk_is_said_and_does_not_end_the_beacon(tmp_path: Path) -> None:
    stream = io.StringIO()
    gone = tmp_path / "gone"
    gone.mkdir()
    beacon = Beacon(gone, lambda: Status(state="training"), print, display=PlainDisplay(stream, stop=STOP))
    beacon.publish()
    (gone / "status.json").unlink()
    gone.rmdir()
    beacon.publish()
    beacon.publish()
    assert "attention: " in stream.getvalue()
    assert "status cannot be written" in stream.getvalue()


def test_a_status_that_cannot_be_told_is_said_and_does_not_end_the_beacon(tmp_path: Path) -> None:
    stream, answers = io.StringIO(), iter([1])

    def read() -> Status:
        next(answers)  # the second call fails
        return Status(state="training")

    beacon = Beacon(tmp_path, read, print, display=PlainDisplay(stream, stop=STOP))
    beacon.publish()
    beacon.publish()
    assert "attention: the status cannot be read (StopIteration: )" in stream.getvalue()


def test_a_model_that_is_fetched_is_told_every_tenth_and_drawn_as_a_bar() -> None:
    come = [
        Status(state="syncing", model_here=n, model_nbytes=1000, received_per_second=10.0) for n in range(0, 1001, 25)
    ]
    lines = plain_lines(*come)
    told = [line for line in lines if "are here" in line]
    assert len(told) == 10  # the first, and nine tenths; after the last it trains
    assert "about 90 s left" in told[1]
    console = Console(file=io.StringIO(), width=80)
    console.print(render(come[10], STOP, rows=24))
    assert "[#####---------------] 25%" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_request_that_fails_does_not_end_what_tells_how_the_peer_is(tmp_path: Path) -> None:
    obeyed = threading.Event()

    def obey(request: Request) -> None:
        if request.name == "pause":
            raise RuntimeError("this portal is not running")
        obeyed.set()

    with Beacon(tmp_path, Status, obey, period=0.02):
        ask(tmp_path, "pause")
        until(lambda: "the request to pause was not obeyed" in read_status(tmp_path).problem)
        ask(tmp_path, "resume")
        assert obeyed.wait(PATIENCE)
        until(lambda: read_status(tmp_path).problem == "")
