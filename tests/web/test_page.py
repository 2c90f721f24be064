"""The page in a real browser: on a live swarm of three that loses one, in a replay, and with hostile names."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from decentral.cli.demo_processes import Family
from decentral.observe.status import ProcessInfo, write_status
from tests.dashboard.conftest import Serve, folder, serve
from tests.kit.site import GOLDEN, ME, OTHER, THIRD, Folder
from tests.web.conftest import Look

__all__ = ["folder", "serve"]  # fixtures

pytestmark = pytest.mark.timeout(600)
PATIENCE = 240_000  # ms for what a swarm on a busy machine does
Looks = Callable[..., Look]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three real peers, one of which is killed at a third of the rounds, and a newcomer later."""
    out = tmp_path_factory.mktemp("demo") / "run"
    command = [sys.executable, "-m", "decentral", "demo", "--peers", "3", "--minutes", "1.5", "--out", str(out)]
    with Family() as family:
        family.start_command("demo", out.with_name("demo"), command)
        yield out


@pytest.fixture(scope="module")
def address(demo: Path) -> Iterator[str]:
    """Of the page, as a person starts it: the second command."""
    command = [sys.executable, "-m", "decentral", "dashboard", "--out", str(demo), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


def rounds(page: Page) -> int:
    return page.locator(".strip li").count()


def test_a_live_swarm_moves_on_the_page_and_a_killed_peer_is_seen(address: str, look: Looks) -> None:
    desk, phone = look(), look(dark=True, phone=True)
    for one in (desk, phone):
        one.page.goto(address)
    expect(desk.page.locator("#health-word")).to_have_text(re.compile("healthy|late"), timeout=PATIENCE)
    expect(desk.page.locator(".strip li")).not_to_have_count(0, timeout=PATIENCE)
    expect(desk.page.locator("#peers tbody tr")).to_have_count(3, timeout=PATIENCE)
    desk.shoot("live-light")
    seen = rounds(desk.page)
    expect(desk.page.locator("#peers .tag", has_text="gone")).to_have_count(1, timeout=PATIENCE)
    expect(desk.page.locator("#graph .node[data-gone]")).not_to_have_count(0)
    desk.shoot("killed-light")
    expect(desk.page.locator(".strip li").nth(seen)).to_be_visible(timeout=PATIENCE)  # one more than there were
    expect(phone.page.locator("#health-word")).not_to_be_empty()
    phone.shoot("phone-dark", whole=True)
    for one in (desk, phone):
        assert one.serious() == []
        assert not one.is_too_wide()
        assert one.complaints == []
        assert one.asked == {address.split("/")[2]}, "nothing is asked of anybody else"


def test_another_peer_of_the_folder_is_one_choice_away(address: str, look: Looks) -> None:
    page = look().page
    page.goto(address)
    page.locator("#folder").select_option("peer-1", timeout=PATIENCE)
    page.wait_for_url("**/?peer=peer-1")
    expect(page.locator("#folder")).to_have_value("peer-1")
    expect(page.locator("#me")).to_contain_text("Contributed", timeout=PATIENCE)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("phone", [False, True])
def test_a_replay_is_moved_by_the_keyboard_alone(serve: Serve, look: Looks, dark: bool, phone: bool) -> None:
    site, one = serve(GOLDEN, replay=True), look(dark=dark, phone=phone)
    page = one.page
    page.goto(f"http://127.0.0.1:{site.port}/")
    expect(page.locator("#slider-at")).to_have_text(re.compile(r"^(\d+) of \1$"), timeout=PATIENCE)  # it has come
    last = int(page.locator("#slider").get_attribute("max") or 0)
    expect(page.locator("#slider-at")).to_have_text(f"{last} of {last}")
    for _ in range(40):
        if page.evaluate("document.activeElement.id") == "slider":
            break
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#health-text")).to_contain_text(f"round {last - 1} of")
    expect(page.locator(".strip li")).to_have_count(last - 1)
    page.keyboard.press("Home")
    expect(page.locator("#health-text")).to_contain_text("round 1 of")
    page.keyboard.press("End")
    expect(page.locator(".strip li")).to_have_count(last)
    one.shoot(f"replay-{'phone' if phone else 'desk'}-{'dark' if dark else 'light'}", whole=True)
    assert one.serious() == []
    assert not one.is_too_wide()
    assert one.complaints == []


def test_rounds_are_walked_through_by_arrow_keys(serve: Serve, look: Looks) -> None:
    site, page = serve(GOLDEN, replay=True), look().page
    page.goto(f"http://127.0.0.1:{site.port}/")
    newest = page.locator(".strip button[aria-pressed=true]")
    newest.focus()
    last = rounds(page)
    for key, step in (("ArrowLeft", last - 1), ("ArrowLeft", last - 2), ("Home", 1), ("ArrowRight", 2), ("End", last)):
        page.keyboard.press(key)
        expect(page.locator("#round dd").first).to_contain_text(f"{step}, at")
        assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(f"Round {step},")


def test_a_name_that_is_markup_is_shown_as_text_and_runs_nothing(folder: Folder, serve: Serve, look: Looks) -> None:
    evil = "<script>window.hit=1</script><img src=x onerror='window.hit=1'>"
    members = [{"peer": name, "self": name == ME, "live": True} for name in (ME, evil, OTHER)]
    said = {"prompt": "The ", "text": f"The {evil}", "round": 1}
    folder.write(names={OTHER: "A_name-of-16char", evil: evil}, sample=said)
    folder.write(members=tuple(members), run=evil, notices=(evil,), health=f"attention: {evil}", algorithm=evil)
    folder.events("dropped", what=evil, why=evil)
    folder.round(ME, evil, members=(ME, evil, THIRD))
    site, one = serve(folder.path), look()
    one.page.goto(f"http://127.0.0.1:{site.port}/")
    expect(one.page.locator("#health-text")).to_have_text(evil)
    expect(one.page.locator("#events")).to_contain_text(evil)
    expect(one.page.locator("#run-name")).to_have_text(evil)
    expect(one.page.locator("#says q")).to_have_text(f"The {evil}")
    expect(one.page.locator("#peers")).to_contain_text(f"A_name-of-16char ({OTHER[-6:]})")
    expect(one.page.locator("#graph")).to_contain_text(f"A_name-of-1……{OTHER[-6:]}")
    assert one.page.locator("main script, main img").count() == 0
    assert one.page.evaluate("window.hit") is None
    assert one.complaints == []


def test_what_breaks_off_is_said_and_taken_up_again(folder: Folder, look: Looks, tmp_path: Path) -> None:
    from decentral.dashboard.server import Place, listen

    folder.write(health="healthy: round 0")
    first = listen(folder.path, Place(port=0), version="1", period=0.05)
    page, port = look().page, first.place.port
    with first.serve_on_thread():
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("#link")).to_have_text("connected")
    expect(page.locator("#link")).to_contain_text("not reached")
    folder.write(health="healthy: round 1")
    with listen(folder.path, Place(port=port), version="1", period=0.05).serve_on_thread():
        expect(page.locator("#link")).to_have_text("connected", timeout=60_000)
        expect(page.locator("#health-text")).to_have_text("round 1")


MEMBERS = (
    *({"peer": ME, "self": True, "live": True}, {"peer": OTHER, "live": True, "round": 2, "seen": 0.8}),
    {"peer": THIRD, "live": True, "round": 1, "seen": 1.5},
)


def first_cells(page: Page) -> list[str]:
    return [str(cell)[:8].strip() for cell in page.locator("#peers tbody td:first-child").all_inner_texts()]


def test_a_peer_that_has_ended_is_shown_as_it_was(folder: Folder, serve: Serve, look: Looks) -> None:
    """It said "live, 866 ms ago" for ever."""
    folder.round(ME, OTHER, members=(ME, OTHER, THIRD))
    folder.write(state="done", members=MEMBERS, updated=1_795_000_000.0)
    write_status(folder.path, folder.status, ProcessInfo(pid=2**22, created=1.0))
    page = look().page
    page.goto(f"http://127.0.0.1:{serve(folder.path).port}/")
    expect(page.locator("#link")).to_have_text(re.compile(r"^ended, as of \d\d:\d\d:\d\d$"))
    expect(page.locator("#peers .tag").first).to_have_text("was live")
    expect(page.locator("#peers")).not_to_contain_text("ago")


def test_the_table_has_this_peer_first_then_who_is_missing_and_is_sorted_by_a_click(
    folder: Folder, serve: Serve, look: Looks
) -> None:
    folder.round(ME, OTHER, members=(ME, OTHER, THIRD))
    folder.write(members=MEMBERS)
    one = look()
    page = one.page
    page.goto(f"http://127.0.0.1:{serve(folder.path).port}/")
    expect(page.locator("#peers tbody tr")).to_have_count(3)
    you, other, third = (f"…{name[-6:]}" for name in (ME, OTHER, THIRD))
    assert first_cells(page) == [you, third, other]
    expect(page.locator("#peers thead")).not_to_contain_text("Uplink")  # nobody's is known
    page.get_by_role("button", name="Round", exact=True).click()
    assert first_cells(page) == [you, third, other]
    page.get_by_role("button", name="Round", exact=True).click()
    assert first_cells(page) == [other, third, you]
    assert one.serious() == []


def test_what_a_sentence_says_to_type_is_copied_by_a_button(folder: Folder, serve: Serve, look: Looks) -> None:
    folder.write(notices=("your update is 9 times as large as theirs; decentral leave --out decentral-run",))
    page = look().page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(f"http://127.0.0.1:{serve(folder.path).port}/")
    button = page.locator("#notices .copy")
    button.click()
    expect(button).to_have_text("copied")
    assert page.evaluate("navigator.clipboard.readText()") == "decentral leave --out decentral-run"


def test_one_unit_of_loss_and_older_events_behind_a_word(folder: Folder, serve: Serve, look: Looks) -> None:
    for number in range(20):
        folder.events("catch_up_failed", why=f"reason {number}")
    folder.metrics.inner(10, loss=math.log(4.0))
    folder.write(loss=math.log(4.0), held_out_loss=math.log(8.0))
    page = look().page
    page.goto(f"http://127.0.0.1:{serve(folder.path).port}/")
    expect(page.locator("#me")).to_contain_text("training 2.000, held-out 3.000, bits per byte")
    expect(page.locator("#learning")).to_contain_text("Training loss of this peer, bits per byte: 2.000")
    expect(page.locator("#events summary")).to_have_text("4 older")
    expect(page.locator("#events > ul li")).to_have_count(16)
