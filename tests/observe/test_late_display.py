import io
from typing import Any

import pytest

from decentral.observe.screen import PATIENCE, LateDisplay
from decentral.observe.status import Status


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
        now[0] += PATIENCE / 2
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
