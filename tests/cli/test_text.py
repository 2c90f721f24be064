"""A run's text that travels: what founder and newcomer type and read, and a URL that serves it, or something else."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from decentral.cli import text as text_module
from decentral.cli.demo_processes import Family
from decentral.cli.invite import text_wanted
from decentral.cli.options import JobOptions
from decentral.cli.runs import first_screen
from decentral.cli.text import _HttpsAlone, download, text_of_run
from decentral.dissemination.text import list_chunks, list_digest
from decentral.errors import DataError, TransportError
from decentral.manifest import Manifest, load_manifest
from decentral.peer import joining
from decentral.swarm.invite import Invite
from decentral.wire.keys import peer_name
from tests.cli.conftest import Run
from tests.kit.families import NET, documented_files, write_terms
from tests.kit.patience import PATIENCE, until

WORDS = b"the quick brown fox jumps over the lazy dog, and a hen looks on\n" * 3000
URL = "https://example.org/foxes"


@pytest.fixture
def foxes(tmp_path: Path) -> Path:
    (tmp_path / "foxes.txt").write_bytes(WORDS)
    return tmp_path / "foxes.txt"


def terms_by(run: Run, foxes: Path, *more: str) -> Manifest:
    result = run("init", "run.toml", "--data", foxes, "--preset", "diloco", "--force", *more)
    assert result.exit_code == 0, result.stderr
    return load_manifest(foxes.parent / "run.toml")


# ---- the terms ----


def test_terms_of_a_text_that_travels_hold_its_size_and_the_digest_of_its_chunks(run: Run, foxes: Path) -> None:
    plain, shared = terms_by(run, foxes), terms_by(run, foxes, "--share-text", "--text-url", URL)
    assert plain.data.shared is None
    assert shared.data.digest == plain.data.digest
    assert shared.data.shared is not None
    assert (shared.data.shared.nbytes, shared.data.shared.url) == (len(WORDS), URL)
    assert shared.data.shared.chunks is not None
    assert shared.digest != plain.digest


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        (["--share-text"], 2, "name it with --data"),
        (["--text-url", URL], 2, "name it with --data"),
        (["--data", "foxes.txt", "--text-url", "http://example.org/foxes"], 10, "has characters that do not belong"),
        (["--data", "foxes.txt", "--text-url", "https://a b"], 10, "has characters that do not belong"),
    ],
)
def test_terms_that_cannot_be_meant_are_refused(run: Run, foxes: Path, typed: list[str], code: int, said: str) -> None:
    result = run("init", "run.toml", *typed)
    assert result.exit_code == code
    assert said in result.stderr
    assert not (foxes.parent / "run.toml").exists()


def test_the_first_screen_says_that_the_text_travels_and_the_invite_asks_for_none(run: Run, foxes: Path) -> None:
    manifest = terms_by(run, foxes, "--share-text")
    options = JobOptions(out=foxes.parent / "run", data=foxes)
    _, said = text_of_run(manifest, text_module.survey(foxes), options)
    assert "text    foxes.txt, 0.2 MB: travels with the run; who joins needs no copy" in first_screen(
        manifest, said, options
    )
    assert text_wanted(manifest.data) == ""
    assert text_wanted(terms_by(run, foxes).data) == " --data PATH/TO/foxes.txt"


# ---- who joins ----


def test_a_text_that_is_too_large_for_this_peer_is_refused_in_one_line(run: Run, foxes: Path, tmp_path: Path) -> None:
    manifest = terms_by(run, foxes, "--share-text")
    with pytest.raises(DataError, match=r"foxes\.txt, has 0\.2 MB, and this peer takes 0\.1 MB at most; .*--max-text"):
        text_of_run(manifest, None, JobOptions(out=tmp_path / "out", max_text=100_000))
    assert not (tmp_path / "out").exists()


def test_without_leave_to_travel_it_is_today_s_sentence_and_whom_to_ask(run: Run, foxes: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="name your copy of it with --data PATH: ask who began the run"):
        text_of_run(terms_by(run, foxes), None, JobOptions(out=tmp_path))


def test_a_text_that_is_in_the_folder_is_trained_on_and_another_is_refused(
    run: Run, foxes: Path, tmp_path: Path
) -> None:
    manifest, options = terms_by(run, foxes, "--share-text"), JobOptions(out=tmp_path)
    (tmp_path / "text").write_bytes(WORDS)
    assert text_of_run(manifest, None, options)[0] == replace(options, data=tmp_path / "text")
    (tmp_path / "text").write_bytes(WORDS + WORDS)
    with pytest.raises(DataError, match="is other text than the run's"):
        text_of_run(manifest, None, options)


def test_with_nobody_to_ask_it_says_so(run: Run, foxes: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is nobody to fetch it from; name it with --data PATH"):
        text_of_run(terms_by(run, foxes, "--share-text"), None, JobOptions(out=tmp_path / "out"))


# ---- from peers ----


Fetch = Callable[..., None]


@pytest.fixture
def peers_give(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes, float], None]:
    """Have the run's peers give these bytes, in so many seconds."""

    def give(whole: bytes, seconds: float = 0.0) -> None:
        now = time.monotonic()

        def fetch(invite: object, shared: object, path: Path, asked: object, **_: object) -> None:
            path.write_bytes(whole)
            monkeypatch.setattr(time, "monotonic", lambda: now + seconds)

        monkeypatch.setattr(joining, "fetch_text", fetch)

    return give


def options_of_who_joins(manifest: Manifest, out: Path, **more: Any) -> JobOptions:
    invite = str(Invite(manifest.digest, ("/ip4/127.0.0.1/tcp/1/p2p/" + peer_name(bytes(32)),)))
    return JobOptions(out=out, invite=invite, **more)


def test_what_came_by_another_way_is_not_left_behind(
    run: Run, foxes: Path, tmp_path: Path, web: type[Web], peers_give: Fetch
) -> None:
    manifest, out = terms_by(run, foxes, "--share-text", "--text-url", URL), tmp_path / "out"
    out.mkdir()
    web.most = 100
    (out / "text.partial").write_bytes(WORDS[:1000])
    peers_give(WORDS)
    options, _ = text_of_run(manifest, None, options_of_who_joins(manifest, out))
    assert options.data == out / "text"
    assert [path.name for path in out.iterdir()] == ["text"]


def test_time_that_the_text_takes_is_no_time_without_an_answer(
    run: Run, foxes: Path, tmp_path: Path, peers_give: Fetch
) -> None:
    manifest, give_up_at = terms_by(run, foxes, "--share-text"), time.monotonic() + 60
    peers_give(WORDS, 1000.0)
    options, _ = text_of_run(manifest, None, options_of_who_joins(manifest, tmp_path / "out", give_up_at=give_up_at))
    assert options.give_up_at == pytest.approx(give_up_at + 1000, abs=30)


def test_chunks_that_make_another_text_than_the_terms_digest_are_not_kept(
    run: Run, foxes: Path, tmp_path: Path, peers_give: Fetch
) -> None:
    manifest = terms_by(run, foxes, "--share-text")
    peers_give(WORDS.replace(b"fox", b"cat"))
    with pytest.raises(DataError, match="the terms contradict themselves"):
        text_of_run(manifest, None, options_of_who_joins(manifest, tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []


# ---- from a URL ----


class Web(BaseHTTPRequestHandler):
    """Serves one body, from where it is asked for if ``ranges``; at most ``most`` bytes of it."""

    body: ClassVar[bytes] = WORDS
    ranges: ClassVar[bool] = True
    most: ClassVar[int] = 1 << 30
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        begin = int(self.headers["Range"].removeprefix("bytes=").rstrip("-")) if self.ranges else 0
        self.asked.append(self.headers["Range"])
        self.send_response(206 if self.ranges else 200)
        self.send_header("Content-Length", str(len(self.body) - begin))
        self.end_headers()
        self.wfile.write(self.body[begin : begin + self.most])

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Web]]:
    class Own(Web):
        asked: ClassVar[list[str]] = []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()

    def from_there(request: urllib.request.Request) -> Any:
        request.full_url = f"http://127.0.0.1:{server.server_port}/foxes"
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10)

    monkeypatch.setattr(text_module, "_open_https", from_there)
    monkeypatch.setattr(download, "__kwdefaults__", {**download.__kwdefaults__, "open_": from_there})
    yield Own
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_goes_on_where_it_was_cut(web: type[Web], tmp_path: Path, ranges: bool) -> None:
    path, shown = tmp_path / "text.begun", list[int]()
    web.most = 100_000
    with pytest.raises(TransportError):
        download(URL, path, len(WORDS), shown.append)
    assert path.read_bytes() == WORDS[:100_000]
    web.most, web.ranges = 1 << 30, ranges
    download(URL, path, len(WORDS), shown.append)
    assert path.read_bytes() == WORDS
    assert web.asked == ["bytes=0-", "bytes=100000-"]
    assert shown[-1] == len(WORDS)
    download(URL, path, len(WORDS), shown.append)
    assert len(web.asked) == 2, "it is all here"


def test_no_more_is_taken_than_the_terms_say_and_no_faster_than_allowed(web: type[Web], tmp_path: Path) -> None:
    web.body, waited = WORDS + WORDS, list[float]()
    path, still = tmp_path / "text.begun", lambda: 0.0
    download(URL, path, len(WORDS), lambda here: None, rate=1000.0, clock=still, wait=waited.append)
    assert path.read_bytes() == WORDS
    assert waited[-1] == len(WORDS) / 1000.0


def test_a_url_that_creeps_is_left_and_what_came_is_kept(web: type[Web], tmp_path: Path) -> None:
    now, path = iter(range(0, 10**6, 60)), tmp_path / "text.begun"  # a minute for each piece
    with pytest.raises(TransportError, match="it creeps, "):
        download(URL, path, len(WORDS), lambda here: None, clock=lambda: float(next(now)))
    assert 0 < path.stat().st_size < len(WORDS)
    assert WORDS.startswith(path.read_bytes())


def test_what_is_at_the_url_is_the_run_s_text_or_nothing(web: type[Web], run: Run, foxes: Path, tmp_path: Path) -> None:
    manifest = terms_by(run, foxes, "--text-url", URL)
    (tmp_path / "out").mkdir()
    web.body = WORDS.replace(b"fox", b"cat")
    with pytest.raises(DataError, match=r"other text than the run's foxes\.txt; try again, or name your copy"):
        text_of_run(manifest, None, JobOptions(out=tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []
    web.body = WORDS
    options, said = text_of_run(manifest, None, JobOptions(out=tmp_path / "out"))
    assert options.data == tmp_path / "out/text"
    assert options.data.read_bytes() == WORDS
    assert said == f"foxes.txt, 0.2 MB: from {URL}"


def test_it_leads_to_https_alone() -> None:
    asked = urllib.request.Request(URL)
    assert _HttpsAlone().redirect_request(asked, None, 302, "", {}, "https://elsewhere.org/") is not None
    for elsewhere in ("http://elsewhere.org/", "ftp://elsewhere.org/"):
        with pytest.raises(OSError, match="which is no https"):
            _HttpsAlone().redirect_request(asked, None, 302, "", {}, elsewhere)


# ---- two real peers ----


@pytest.mark.long
@pytest.mark.timeout(600)
def test_who_joins_without_the_text_and_is_killed_on_the_way_ends_with_the_same_model(
    family: Family, tmp_path: Path
) -> None:
    whole = random.Random(1).randbytes(350_000).hex().encode()  # three chunks, which take seconds by the least cap
    (tmp_path / "foxes").write_bytes(whole)
    chunks = list_digest(list_chunks([whole]), len(whole))
    shared = {"nbytes": len(whole), "chunks": chunks}
    digest = text_module.survey(tmp_path / "foxes").digest
    write_terms(
        tmp_path, 2, data={"corpus": "foxes", "batch_size": 2, "digest": digest, "shared": shared}, inner={"steps": 2}
    )
    found = ["start", str(tmp_path / "run.toml"), "--data", str(tmp_path / "foxes"), *NET]
    first = family.start("first", tmp_path / "first", [*found, "--out", str(tmp_path / "first")])
    line = first.first_line(PATIENCE)
    assert " --data " not in line
    out = tmp_path / "second"
    join, partial = ["join", line.split()[2], *NET, "--out", str(out)], out / "text.partial"
    slow = family.start("slow", out, [*join, "--max-download", "270kbit"])
    until(lambda: partial.exists() and any(partial.read_bytes()))
    slow.process.kill()
    assert slow.process.wait() == -signal.SIGKILL
    assert not (out / "text").exists()
    second = family.start("second", out, join)
    assert second.process.wait(PATIENCE) == 0
    assert first.process.wait(PATIENCE) == 0
    assert (out / "text").read_bytes() == whole
    assert not partial.exists()
    ends = [json.loads((peer.directory / "summary.json").read_text())["anchor_digest"] for peer in (first, second)]
    assert ends[0] == ends[1]
    assert {path.name for path in out.iterdir()} - {"stdout.txt", "stderr.txt"} <= documented_files()
