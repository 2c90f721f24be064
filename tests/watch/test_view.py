"""The view as somebody sees it, and what its keys do: driven by textual's pilot, on folders as peers leave them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len
from textual.events import Key
from textual.pilot import Pilot

from decentral.observe.requests import Request, take_requests
from decentral.observe.status import ProcessInfo, Status, write_status
from decentral.watch.app import Watch
from tests.kit.site import GOLDEN, ME, OTHER, THIRD, Folder
from tests.watch.screens import SIZES, drive, golden, lines_of, screen, typed

HOSTILE = "\x1b]0;owned\x07\x1b[31m[bold red]x[/]\u202e\n{}"
every_size = pytest.mark.parametrize("size", SIZES, ids=[f"{width}x{height}" for width, height in SIZES])


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as here:
        here.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def busy(folder: Folder) -> None:
    """A peer in the middle of everything, with names and sentences as long as they come."""
    others = tuple({"peer": f"12D3KooW{at:044}", "path": "relayed", "seen": 3.1, "answers_in": 0.2} for at in range(30))
    for _ in range(250):
        folder.round(ME, OTHER, members=(ME, OTHER, THIRD), seconds=31.4)
    for step in range(900):
        folder.metrics.inner(step, loss=9 - step / 100)
    folder.events("sync_failed", peer=OTHER, why="the line was cut in the middle of a state, " * 9)
    folder.write(
        run="a run with a name that is longer than a line of a small terminal has cells",
        round=250,
        rounds=1_000_000,
        seconds_left=1e6,
        members=({"peer": ME, "self": True}, *others),
        open_round={"round": 251, "members": 31, "offers": 12, "leader": OTHER, "votes": 3, "proposed": True},
        max_upload=625_000.0,
        max_download=2.5e6,
        daily_upload=10**10,
        num_parameters=10**9,
        inner_steps=10**6,
        rounds_seen=100,
        rounds_contributed=12,
        health="attention: " + "something is wrong with this peer, and it takes long to say what; " * 9,
    )


@every_size
@pytest.mark.usefixtures("utc")
def test_the_screen_of_a_run_that_is_over_is_the_golden_one(size: tuple[int, int]) -> None:
    assert screen(GOLDEN, size=size) == golden(size).read_text(encoding="utf-8").splitlines()


def test_the_picture_in_the_docs_is_the_golden_one() -> None:
    page = (Path(__file__).parents[2] / "docs/dashboard.md").read_text(encoding="utf-8")
    assert golden((80, 24)).read_text(encoding="utf-8") in page


@every_size
def test_everything_has_a_line_and_what_is_cut_has_an_ellipsis(folder: Folder, size: tuple[int, int]) -> None:
    busy(folder)
    lines = screen(folder.path, size=size)
    assert len(lines) == size[1]
    assert all(cell_len(line) <= size[0] for line in lines)
    text = "\n".join(lines)
    for part in (
        "attention: something",
        "this peer",
        "the others: 30 here",
        "rounds, up to 250",
        "training loss",
        "q close",
    ):
        assert part in text, part
    assert "…" in lines[0] or "left" in lines[0]
    assert "below: up, down" in text
    assert sum(line.count("╭") for line in lines) == sum(line.count("╯") for line in lines) == 4


@pytest.mark.parametrize("size", [(30, 8), (12, 5), (5, 3), (1, 1)])
def test_a_terminal_that_is_far_too_small_ends_nothing(folder: Folder, size: tuple[int, int]) -> None:
    busy(folder)
    assert len(screen(folder.path, "down", "p", "n", size=size)) == size[1]


def test_what_others_chose_is_neither_markup_nor_an_escape(folder: Folder) -> None:
    for _ in range(3):
        folder.round(ME, HOSTILE, members=(ME, HOSTILE), leader=HOSTILE)
    folder.events("sync_failed", peer=HOSTILE, why=HOSTILE)
    folder.events(HOSTILE, text=HOSTILE)
    folder.write(
        run=HOSTILE,
        algorithm=HOSTILE,
        health=f"{HOSTILE}: {HOSTILE}",
        reachability=HOSTILE,
        open_round={"round": HOSTILE, "members": HOSTILE, "offers": HOSTILE, "leader": HOSTILE, "votes": HOSTILE},
        members=({"peer": ME, "self": True}, {"peer": "[u]x[/]", "path": HOSTILE, "seen": HOSTILE, "round": HOSTILE}),
    )
    text = "\n".join(screen(folder.path, size=(200, 50)))
    assert "[bold red]x[/]" in text
    assert "[u]x[/]" in text
    assert all(sign.isprintable() for line in text.splitlines() for sign in line)


def test_a_question_comes_before_a_request_and_y_leaves_it(folder: Folder) -> None:
    folder.write(trains_while_paused=False)
    assert any(f"pause this peer …{ME[-6:]}? y/n" in line for line in screen(folder.path, "p"))
    assert take_requests(folder.path) == ()
    answer = screen(folder.path, "p", "y")[-1]
    assert answer.startswith(" asked: the peer will pause after this inner step")
    assert take_requests(folder.path) == (Request("pause"),)


@pytest.mark.parametrize(("key", "request_"), [("r", "resume"), ("f", "finish"), ("l", "leave")])
def test_each_key_leaves_its_own_request(folder: Folder, key: str, request_: str) -> None:
    screen(folder.path, key, "y")
    assert take_requests(folder.path) == (Request(request_),)


@pytest.mark.parametrize("no", ["n", "escape", "enter", "q"])
def test_every_other_key_is_no(folder: Folder, no: str) -> None:
    lines = screen(folder.path, "p", no)
    assert lines[-1] == " nothing was asked of the peer"
    assert not any("y/n" in line for line in lines)
    assert take_requests(folder.path) == ()


def test_a_peer_that_has_ended_is_not_asked(folder: Folder) -> None:
    write_status(folder.path, Status(state="done", peer=ME), ProcessInfo(pid=2**22, created=1.0))
    assert screen(folder.path, "l", "y")[-1] == " no peer runs here now; nothing to leave"
    assert take_requests(folder.path) == ()


def test_a_peer_that_ends_while_the_question_stands_is_not_asked(folder: Folder) -> None:
    async def ends_meanwhile(app: Watch, pilot: Pilot[BaseException]) -> None:
        await typed(app, pilot, "p")
        write_status(folder.path, Status(state="left", peer=ME), ProcessInfo(pid=2**22, created=1.0))
        answer = (await typed(app, pilot, "y"))[-1]
        assert "has ended (it was left)" in answer or "…" in answer

    drive(folder.path, ends_meanwhile)
    assert take_requests(folder.path) == ()


def test_q_closes_the_view_and_asks_nothing_of_the_peer(folder: Folder) -> None:
    async def close(app: Watch, pilot: Pilot[BaseException]) -> None:
        await pilot.press("q")

    assert drive(folder.path, close).return_value is None
    assert take_requests(folder.path) == ()


def test_ctrl_c_ends_the_view_as_an_interrupt_even_below_a_question(folder: Folder) -> None:
    async def interrupt(app: Watch, pilot: Pilot[BaseException]) -> None:
        await pilot.press("p", "ctrl+c")

    assert isinstance(drive(folder.path, interrupt).return_value, KeyboardInterrupt)
    assert take_requests(folder.path) == ()


def test_a_look_shows_what_is_new(folder: Folder) -> None:
    async def goes_on(app: Watch, pilot: Pilot[BaseException]) -> None:
        assert "no round was made yet" in "\n".join(lines_of(app))
        folder.round(ME, OTHER)
        folder.write(health="healthy: round 1")
        await app.look()
        await pilot.pause()
        text = "\n".join(lines_of(app))
        assert "healthy: round 1" in text
        assert "rounds, up to 1" in text

    drive(folder.path, goes_on)


def test_a_look_that_fails_ends_the_view_with_what_went_wrong(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(app: Watch, pilot: Pilot[BaseException]) -> None:
        monkeypatch.setattr("decentral.watch.app.peers_in", lambda directory: 1 / 0)
        await app.look()

    assert isinstance(drive(folder.path, fails).return_value, ZeroDivisionError)


def test_a_folder_in_which_nobody_ran_says_so_until_somebody_does(tmp_path: Path) -> None:
    async def comes(app: Watch, pilot: Pilot[BaseException]) -> None:
        assert "no peer has run here" in " ".join("".join(lines_of(app)).split())
        write_status(tmp_path, Status(state="training", peer=ME, health="healthy: round 7"), ProcessInfo())
        await app.look()
        await pilot.pause()
        assert "healthy: round 7" in "\n".join(lines_of(app))

    drive(tmp_path, comes)


def test_arrows_go_from_one_peer_of_a_demo_to_the_next_and_round(tmp_path: Path) -> None:
    for name in ("peer-0", "peer-1"):
        (tmp_path / name).mkdir()
        write_status(tmp_path / name, Status(state="training", peer=name, run="demo"), ProcessInfo())

    async def turn(app: Watch, pilot: Pilot[BaseException]) -> None:
        for key, shown in (("", "peer-0, 1 of 2"), ("right", "peer-1, 2 of 2"), ("right", "peer-0, 1 of 2")):
            assert (await typed(app, pilot, *filter(None, [key])))[0].endswith(shown)
        assert (await typed(app, pilot, "left", "p", "y"))[0].endswith("peer-1, 2 of 2")

    drive(tmp_path, turn)
    assert take_requests(tmp_path / "peer-0") == ()
    assert take_requests(tmp_path / "peer-1") == (Request("pause"),)


def test_down_goes_to_the_last_of_many_peers_and_no_further(folder: Folder) -> None:
    others = tuple({"peer": f"peer{at:03}", "path": "direct"} for at in range(40))
    folder.write(members=({"peer": ME, "self": True}, *others))

    async def scroll(app: Watch, pilot: Pilot[BaseException]) -> None:
        for keys, there, absent in (([], "peer000", "peer039"), (["pagedown"] * 9, "peer039", "peer000")):
            text = "\n".join(await typed(app, pilot, *keys))
            assert there in text
            assert absent not in text
        assert "34 above: up, down" in text
        assert "33 above and 1 below" in "\n".join(await typed(app, pilot, "up"))

    drive(folder.path, scroll)


def test_help_tells_the_keys_and_any_key_closes_it(folder: Folder) -> None:
    async def open_and_close(app: Watch, pilot: Pilot[BaseException]) -> None:
        assert any("pause this peer, resume it" in line for line in await typed(app, pilot, "question_mark"))
        assert not any("pause this peer, resume it" in line for line in await typed(app, pilot, "x"))

    drive(folder.path, open_and_close, (60, 20))


@pytest.mark.parametrize("asked", [True, False])
def test_no_color_is_respected(folder: Folder, monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    monkeypatch.setenv("NO_COLOR", "1") if asked else monkeypatch.delenv("NO_COLOR", raising=False)
    folder.round(ME, OTHER)
    colours: set[str] = set()

    async def look(app: Watch, pilot: Pilot[BaseException]) -> None:
        for strip in app.screen._compositor.render_strips():
            styles = [segment.style for segment in strip if segment.style is not None]
            colours.update(colour.name for style in styles for colour in (style.color, style.bgcolor) if colour)

    drive(folder.path, look)
    assert (colours <= {"default"}) == asked, colours


@pytest.mark.parametrize("opened_by", ["p", "question_mark"])
def test_two_quick_keys_answer_a_question_or_close_the_help_once(folder: Folder, opened_by: str) -> None:
    """The second came before the screen was gone, closed the view's own, and ended it with an error."""
    folder.write()

    async def driver(app: Watch, pilot: Pilot[BaseException]) -> None:
        below = app.screen
        await pilot.press(opened_by)
        above = app.screen
        assert above is not below
        for _ in range(2):
            above.post_message(Key("n", "n"))
        await pilot.pause()
        assert app.screen is below

    drive(folder.path, driver)
    assert list(take_requests(folder.path)) == []
