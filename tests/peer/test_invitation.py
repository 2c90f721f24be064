"""From an invite to its manifest."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from decentral.errors import ConfigError, InviteError, NoPeersError, PayloadError, TransportError
from decentral.manifest import preset_manifest
from decentral.manifest.terms import SharedText
from decentral.observe.screen import hint_after, say
from decentral.parameters import Schema
from decentral.peer.joining import NOBODY, _first_answer, fetch, fetch_text, terms_of
from decentral.peer.network_setup import run_apart
from decentral.swarm.hello import Hello
from decentral.swarm.invite import Invite
from decentral.wire.keys import Signer, peer_name
from tests.kit.patience import PATIENCE


def test_an_invite_that_leads_to_nobody_is_refused_at_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(InviteError, match="nobody who is in it; ask for a fresh one"):
        fetch(Invite(bytes(32), ()), out, None, None)
    assert not out.exists()


def test_a_script_whose_terms_are_missing_is_told_how_to_write_those_of_its_own_model(tmp_path: Path) -> None:
    said = r"no such manifest; write one with: decentral init '.*my run\.toml' --task custom"
    with pytest.raises(ConfigError, match=said):
        terms_of(tmp_path / "my run.toml", None, "native")


@pytest.mark.parametrize("lan", [True, False])
def test_when_nobody_answers_in_time_that_is_said_and_nothing_waits_on(tmp_path: Path, lan: bool) -> None:
    gone = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_name(Signer(bytes(32)).peer)}"
    with pytest.raises(NoPeersError, match=r"no peer of run 000000000000 answered in time"):
        fetch(Invite(bytes(32), (gone,)), tmp_path, ("/ip4/127.0.0.1/tcp/0",), 0.3, "native", lan=lan)


def test_who_only_asks_for_the_terms_loads_no_dht(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that left its block in the seconds after it waited for hivemind's import, up to a minute where the
    machine was busy.
    """
    asked = []

    async def share(*_: object) -> None:
        asked.append(True)

    monkeypatch.setattr("decentral.swarm.directory.share", share)
    gone = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_name(Signer(bytes(32)).peer)}"
    with pytest.raises(NoPeersError):
        fetch(Invite(bytes(32), (gone,)), tmp_path, ("/ip4/127.0.0.1/tcp/0",), 2.0, "daemon", lan=False)
    assert not asked


def test_a_script_that_is_told_to_end_while_it_asks_ends_with_its_own_status() -> None:
    async def end() -> None:
        raise SystemExit(3)

    async def ask() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(end)
            await anyio.sleep_forever()

    with pytest.raises(SystemExit) as told:
        run_apart(ask)
    assert told.value.code == 3


@pytest.mark.parametrize("quiet", [False, True])
def test_a_script_that_looks_for_a_run_says_so_and_what_may_be_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    """It waited for a run that was over, and for nobody, without a word."""
    told, waited = threading.Event(), hint_after

    @contextmanager
    def hinted(seconds: float, text: str) -> Iterator[None]:
        with waited(0.0, text):
            told.wait(PATIENCE)  # the hint comes from a thread of its own
            yield

    def said_by(text: str) -> None:
        say(text)
        told.set() if "nobody" in text else None

    monkeypatch.setattr("decentral.peer.joining.hint_after", hinted)
    monkeypatch.setattr("decentral.observe.screen.say", said_by)
    gone = Invite(bytes(32), (f"/ip4/127.0.0.1/tcp/1/p2p/{peer_name(Signer(bytes(32)).peer)}",))
    with pytest.raises(NoPeersError):
        terms_of(str(gone), tmp_path / "out", "native", lan=False, join_timeout=0.5, quiet=quiet)
    nobody = "decentral: " + NOBODY.format("join(join_timeout=S)")
    said = capsys.readouterr().err.splitlines()
    assert said == ([] if quiet else ["decentral: looking for the run's peers ...", nobody])


@pytest.mark.parametrize("token", [None, "twelve-signs"])
@pytest.mark.parametrize(("here", "comes"), [((3, 7), True), ((0, 0), False), ((3, 3), False)])
def test_who_fetches_a_text_gives_up_when_nothing_more_comes_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: tuple[int, ...], comes: bool, token: str | None
) -> None:
    """A break of the line ended a fetch that had gone on for longer than --join-timeout."""
    tries = iter(here)

    class Fetch:
        here = 0

        def __init__(self, *_: object, **__: object) -> None:
            """Know nobody."""

        async def run(self, peers: object) -> None:
            if (now := next(tries, None)) is not None:
                self.here = now
                raise TransportError("nobody gives more")

    monkeypatch.setattr("decentral.peer.joining.TextFetch", Fetch)
    monkeypatch.setattr("decentral.peer.joining.RETRY", 0.0)
    gone = Invite(bytes(32), (f"/ip4/127.0.0.1/tcp/1/p2p/{peer_name(Signer(bytes(32)).peer)}",), token)
    way = {"max_upload": None, "max_download": None, "listen": ("/ip4/127.0.0.1/tcp/0",), "lan": False}
    shared, asked = SharedText(nbytes=1 << 20, chunks="0" * 64), {**way, "transport": "native", "join_timeout": 0.0}
    with nullcontext() if comes else pytest.raises(NoPeersError):
        fetch_text(gone, shared, tmp_path / "text", asked, told=print, dropped=print)  # type: ignore[arg-type]


def test_terms_that_this_version_cannot_read_are_told_of_once_and_others_are_asked_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It looked on for ever, and said that nobody had answered yet."""
    wrong = PayloadError("the peer's manifest is none: [data] newer\x1b: no such key")
    answers = iter([wrong, wrong, wrong, None])
    manifest = preset_manifest("diloco")

    async def ask(*_: object) -> Hello:
        if (answer := next(answers)) is not None:
            raise answer
        return Hello("0.1.0", manifest, Schema(()), 0.0)

    async def at_once(_: float) -> None:
        """Wait for nothing."""

    monkeypatch.setattr("decentral.peer.joining.ask_hello", ask)
    monkeypatch.setattr("decentral.peer.joining.anyio.sleep", at_once)
    directory: Any = SimpleNamespace(live=lambda: [bytes(32)])
    transport: Any = None
    found = anyio.run(_first_answer, Invite(manifest.digest, ()), transport, directory, None)
    assert found.manifest == manifest
    (told,) = [record.getMessage() for record in caplog.records if record.name == "decentral.peer"]
    assert told.endswith("maybe of a newer one: the peer's manifest is none: [data] newer?: no such key")
