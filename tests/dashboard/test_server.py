"""Who may look, and what they are told; asked over a socket."""

from __future__ import annotations

import hashlib
import itertools
import re
from pathlib import Path

import pytest

from decentral.dashboard.server import MOST_VIEWERS, POLICY, STATIC, Place, is_loopback, listen
from decentral.errors import UsageError
from tests.dashboard.conftest import Serve
from tests.kit.site import ME, OTHER, Folder

VENDORED = {  # uplot 1.6.32 as the npm registry has it
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


def test_the_page_and_all_that_it_asks_for_is_here(folder: Folder, serve: Serve) -> None:
    site = serve(folder.path)
    page = site.text("/")
    asked = re.findall(r'(?:src|href)="(static/[^"]+)"', page)
    modules = {path.name for path in STATIC.glob("*.js")}
    assert len(asked) >= 5
    for path in [*asked, *(f"static/{name}" for name in modules)]:
        answer = site.ask(f"/{path}")
        assert answer.status == 200, path
        for name in re.findall(r'from "\./([\w.]+)"', answer.read().decode()):
            assert name in modules


def test_nothing_comes_from_elsewhere() -> None:
    for path in STATIC.rglob("*"):
        if path.suffix in (".html", ".css", ".js") and path.parent == STATIC:
            found = re.findall(r"https?://[^\s\"')]+", path.read_text(encoding="utf-8"))
            assert set(found) <= {"http://www.w3.org/2000/svg"}, path


def test_what_is_vendored_is_what_its_authors_published() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (STATIC / "vendor").iterdir()}
    assert found == VENDORED


def test_every_answer_keeps_foreign_code_out(folder: Folder, serve: Serve) -> None:
    site = serve(folder.path)
    for path in ("/", "/static/main.js", "/api/view", "/nothing", "/static/../../server.py"):
        headers = site.ask(path).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
    assert "unsafe" not in POLICY
    assert POLICY.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")


def test_nothing_can_be_changed_from_the_page(folder: Folder, serve: Serve) -> None:
    site = serve(folder.path)
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert site.ask("/api/view", method).status == 405, method


def test_no_other_file_can_be_had(folder: Folder, serve: Serve) -> None:
    site = serve(folder.path)
    for path in ("/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/etc/passwd"):
        assert site.ask(path).status == 404, path


def test_a_name_of_a_folder_is_never_a_path(folder: Folder, serve: Serve) -> None:
    """Of a folder that is not there the first one is shown."""
    other = Folder(folder.path.parent / "outside")
    other.write(run="outside")
    assert serve(folder.path).view(peer="../outside")["now"]["run"]["name"] == "a run"


def test_a_site_that_rebinds_its_name_to_this_machine_reads_nothing(folder: Folder, serve: Serve) -> None:
    site = serve(folder.path)
    for host in ("evil.example", "evil.example:7070", "127.0.0.1.evil.example", "", "[::2]:1"):
        assert site.ask("/api/view", Host=host).status == 421, host
    for host in ("localhost", "LOCALHOST:7070", "127.0.0.1:7070", "[::1]:7070"):
        assert site.ask("/api/view", Host=host).status == 200, host


CROSS = {"Sec_Fetch_Site": "cross-site"}
STREAM = {"Sec_Fetch_Mode": "no-cors", "Sec_Fetch_Dest": "empty"}  # as fetch(url, {mode: "no-cors"}) asks


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_another_site_cannot_take_the_places_of_viewers(folder: Folder, serve: Serve, site: str) -> None:
    """Its requests were answered, unreadable to it, and the sixteenth was the last that anybody got."""
    page = serve(folder.path)
    foreign = [page.ask("/api/stream", Sec_Fetch_Site=site, **STREAM) for _ in range(MOST_VIEWERS + 4)]
    assert {answer.status for answer in foreign} == {403}
    own = page.ask("/api/stream", Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="cors", Sec_Fetch_Dest="empty")
    assert own.status == 200
    assert page.ask("/api/stream").status == 200, "a browser that does not tell, or curl"


def test_who_follows_a_link_to_the_page_gets_it_and_a_page_that_frames_it_does_not(
    folder: Folder, serve: Serve
) -> None:
    page = serve(folder.path)
    followed = {**CROSS, "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert page.ask("/", **followed).status == 200
    assert page.ask("/?peer=a", **followed).status == 200
    assert page.ask("/", Sec_Fetch_Site="none", Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="document").status == 200
    assert page.ask("/api/stream", **followed).status == 403, "sixteen windows would take the places, too"
    for dest in ("iframe", "object", "embed", "image", "script"):
        assert page.ask("/", **{**followed, "Sec_Fetch_Dest": dest}).status == 403
    assert page.ask("/", **CROSS).status == 403


def test_with_a_token_nobody_looks_without_it(folder: Folder, serve: Serve) -> None:
    site = serve(folder.path, token="a secret")
    for path in ("/", "/static/main.js", "/api/view", "/api/stream", "/?token=another", "/?token="):
        assert site.ask(path).status == 401
        assert site.ask(path, Cookie=f"decentral_{site.port}=another").status == 401
        assert site.ask(path, Authorization="Bearer \xe9").status == 401
    assert site.ask("/api/view", Authorization="Bearer a secret").status == 200


def test_the_token_leaves_the_address_for_a_cookie_that_no_script_reads(folder: Folder, serve: Serve) -> None:
    site = serve(folder.path, token="a-secret")
    answer = site.ask("/?token=a-secret")
    assert (answer.status, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert site.ask("/api/view", Cookie=cookie.partition(";")[0]).status == 200


@pytest.mark.parametrize(
    ("host", "needs"), [("127.0.0.1", False), ("::1", False), ("localhost", False), ("0.0.0.0", True)]
)
def test_where_others_can_reach_the_page_there_is_a_token(host: str, needs: bool) -> None:
    assert is_loopback(host) is not needs
    place = Place(host=host).with_token()
    assert (place.token is not None) is needs
    assert ("?token=" in place.address) is needs
    assert Place(host=host, token="mine").with_token().token == "mine"


def test_a_port_that_is_taken_is_one_line(folder: Folder, serve: Serve) -> None:
    site = serve(folder.path)
    with pytest.raises(UsageError, match=f"cannot listen at 127.0.0.1:{site.port}.*choose another --port"):
        listen(folder.path, Place(port=site.port), version="")


def test_a_viewer_is_told_all_and_then_what_is_new(folder: Folder, serve: Serve) -> None:
    site = serve(folder.path)
    folder.round(ME, OTHER)
    told = site.told(site.ask("/api/stream"))
    first = dict(itertools.islice(told, 5))
    assert set(first) == {"page", "now", "rounds", "learning", "events"}
    folder.round(ME)
    part, value = next((part, value) for part, value in told if part == "rounds")
    assert [made["step"] for made in value["rounds"]] == [1, 2], part


def test_a_page_that_came_too_early_goes_on_by_itself(tmp_path: Path, serve: Serve) -> None:
    site = serve(tmp_path)
    told = site.told(site.ask("/api/stream"))
    words = [value["word"] for part, value in itertools.islice(told, 2) if part == "now"]
    assert words == ["nothing"]
    made = Folder(tmp_path / "peer-0")
    made.write(health="healthy: round 0")
    assert next(value["word"] for part, value in told if part == "now" and "me" in value) == "healthy"
    made.events.close()
    made.metrics.close()


def test_of_several_folders_one_is_chosen_and_all_are_named(tmp_path: Path, serve: Serve) -> None:
    for name in ("peer-0", "peer-1"):
        made = Folder(tmp_path / name)
        made.write(run=name)
        made.events.close()
        made.metrics.close()
    site = serve(tmp_path)
    assert site.view()["now"]["run"]["name"] == "peer-0"
    chosen = site.view(peer="peer-1")
    assert chosen["now"]["run"]["name"] == "peer-1"
    assert [one["name"] for one in chosen["page"]["folders"]] == ["peer-0", "peer-1"]


def test_viewers_are_bounded_and_one_that_left_makes_room(folder: Folder, serve: Serve) -> None:
    site = serve(folder.path)
    viewers = [site.ask("/api/stream") for _ in range(MOST_VIEWERS)]
    for viewer in viewers:
        next(site.told(viewer))
    assert site.ask("/api/stream").status == 503
    site.hang_up(viewers.pop())
    for _ in range(400):  # until the server has noticed: it writes once a period
        if (answer := site.ask("/api/stream")).status == 200:
            break
        site.hang_up(answer)
    assert answer.status == 200


def test_text_that_would_be_markup_is_only_ever_text(folder: Folder, serve: Serve) -> None:
    """What others chose is JSON all the way, and the page's scripts have no way to make markup of it."""
    evil = "</script><img src=x onerror=alert(1)>\n\ndata: {}\r\n\u2028"
    folder.write(members=({"peer": evil, "path": evil},), notices=(evil,))
    folder.events("dropped", what=evil, why=evil)
    site = serve(folder.path)
    told = dict(itertools.islice(site.told(site.ask("/api/stream")), 5))
    assert told["now"]["peers"][0]["peer"] == evil
    for path in STATIC.glob("*.js"):
        script = path.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script)


def test_all_viewers_of_a_folder_are_told_alike(folder: Folder, serve: Serve) -> None:
    site = serve(folder.path)
    folder.round(ME)
    viewers = [site.told(site.ask("/api/stream")) for _ in range(3)]
    for viewer in viewers:
        next(value for part, value in viewer if part == "rounds")
    folder.round(ME, OTHER)
    told = [next(value for part, value in viewer if part == "rounds") for viewer in viewers]
    assert told[0] == told[1] == told[2]
    assert [made["step"] for made in told[0]["rounds"]] == [1, 2]
