"""The first screen of a volunteer, and a round's machine code, which nobody waits for."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from decentral.cli.options import JobOptions
from decentral.cli.runs import first_screen
from decentral.manifest import preset_manifest
from decentral.observe.screen import PlainDisplay
from decentral.observe.status import Status
from decentral.preferences.preferences import Hours, Preferences
from decentral.replica.codec import WarmUp
from decentral.swarm.invite import Invite
from decentral.wire.keys import Signer, peer_name

# ---- the first screen ----

INVITE = str(Invite(bytes(32), (f"/ip4/192.0.2.1/tcp/4001/p2p/{peer_name(Signer(bytes(32)).peer)}",)))
HELD = Preferences(
    schedule=Hours.parse("12:00-13:30,22:00-07:00"), max_memory=8 * 10**9, threads=1, max_compute=0.7, max_upload=1e6
)


@pytest.mark.parametrize("wanted", [Preferences(), HELD])
@pytest.mark.parametrize("invite", [None, INVITE])
@pytest.mark.parametrize("name", ["short", "n" * 64])
def test_it_is_six_lines_before_the_sentence_and_none_is_broken_at_80_columns(
    name: str, invite: str | None, wanted: Preferences
) -> None:
    manifest = preset_manifest("sparseloco", run={"name": name, "minutes": 90.0})
    options = JobOptions(out=Path("decentral-run"), invite=invite, preferences=wanted)
    stream = io.StringIO("\n".join(first_screen(manifest, f"this peer's text is {'/folder' * 20}", options)) + "\n")
    stream.seek(0, io.SEEK_END)
    PlainDisplay(stream, stop="Ctrl-C, or decentral leave --out decentral-run").show(Status(state="starting"))
    *lines, sentence = stream.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["learns", "run", "lasts", "takes", "text", "to"]
    assert max(map(len, (*lines, sentence))) <= 80
    assert sentence.startswith("starting: ")


def test_it_says_what_a_machine_gives() -> None:
    manifest = preset_manifest("diloco", run={"rounds": 12}, inner={"steps": 30})
    options = JobOptions(out=Path("out"), invite=INVITE, preferences=HELD)
    lines = dict(line.split(maxsplit=1) for line in first_screen(manifest, "this peer's text is a book", options))
    assert lines["lasts"] == "12 rounds of 30 training steps"
    assert lines["text"] == "a book"
    assert lines["run"].endswith(" invites you")
    assert lines["takes"].endswith(" at 70%, 12:00-13:30,22:00-07:00; 8.0 GB of memory; 1.0 MB/s up")


def test_an_invite_without_an_address_is_of_somebody_near() -> None:
    options = JobOptions(out=Path("out"), invite=str(Invite(bytes(32), ())))
    assert any("somebody near" in line for line in first_screen(preset_manifest("diloco"), "a book", options))


# ---- machine code ----

# A round that is early, on a machine that never compiled anything; then what was compiled meanwhile.
EARLY = """
import sys, torch
from decentral.manifest import preset_manifest
from decentral.replica.codec import WarmUp, codec_of
codec = codec_of(preset_manifest(sys.argv[1]))
value_N = torch.linspace(-3, 3, 9000, dtype=torch.float32)
warm_up = WarmUp(codec)
early = bytes(codec.encode(value_N, {}, ((9000,),)).body)
assert not warm_up.is_over(), "it was no early round"
warm_up.join()
assert bytes(codec.encode(value_N, {}, ((9000,),)).body) == early
print(early.hex())
"""
ENDS = """
import sys
from decentral.manifest import preset_manifest
from decentral.replica.codec import WarmUp, codec_of
warm_up = WarmUp(codec_of(preset_manifest("sparseloco")))
warm_up.join(1)
assert not warm_up.is_over()
"""
NEVER_ENDS = """
import signal
from decentral.replica.codec import WarmUp
class Endless:
    def warm_up(self):
        while True:
            try:
                while True:
                    pass
            except Exception:
                pass
signal.alarm(60)
WarmUp(Endless()).join(0.1)
"""

FORKS = """
import os, signal, threading
from numba import njit
from numba.core.compiler_lock import global_compiler_lock
import decentral.replica.codec
holds, goes = threading.Event(), threading.Event()
def compile_slowly():
    with global_compiler_lock:
        holds.set()
        goes.wait(0.5)
threading.Thread(target=compile_slowly).start()
holds.wait()
if not (child := os.fork()):
    signal.alarm(60)
    njit(lambda x: x + 1)(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


class Broken:
    """A codec of a method whose own code raises."""

    def warm_up(self) -> None:
        raise ValueError("no such block")


def printed(cache: Path, program: str, *arguments: str) -> str:
    env = os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program, *arguments], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_round_before_it_is_compiled_waits_and_sends_the_same_bytes(tmp_path: Path) -> None:
    assert printed(tmp_path / "one", EARLY, "sparseloco") == printed(tmp_path / "other", EARLY, "sparseloco")


@pytest.mark.timeout(120)
def test_a_worker_that_is_forked_while_it_compiles_can_compile(tmp_path: Path) -> None:
    """Numba's lock stayed with a thread that the worker does not have."""
    assert printed(tmp_path, FORKS) == ""


def test_a_method_that_cannot_be_compiled_ends_the_peer_and_asks_nobody_to_wait() -> None:
    warm_up = WarmUp(Broken())  # type: ignore[arg-type]
    warm_up.join()
    with pytest.raises(ValueError, match="no such block"):
        warm_up.is_over()


@pytest.mark.timeout(120)
def test_a_process_ends_well_while_it_compiles(tmp_path: Path) -> None:
    assert printed(tmp_path, ENDS) == ""


@pytest.mark.timeout(120)
def test_a_process_ends_amid_a_function_that_takes_long_to_compile(tmp_path: Path) -> None:
    assert printed(tmp_path, NEVER_ENDS) == ""
