"""Pictures of the page and of the terminal for the documentation: python -m tools.pictures docs/pictures

Of folders that are made for them, in a minute, whenever a screen has changed. Names, rounds and figures are nobody's,
and no measurements. It takes Chromium and tmux.
"""

from __future__ import annotations

import io
import math
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.text import Text

from decentral.dashboard.server import Place, listen
from decentral.observe.events import EventLog
from decentral.observe.health import health_sentence
from decentral.observe.metrics import MetricsLog
from decentral.observe.screen import open_display
from decentral.observe.status import ProcessInfo, Status, write_status
from decentral.wire.keys import Signer, peer_name

NAMES = ("Anna", "Ben", "", "Chiara", "Deepa", "eva-laptop", "", "Gustavo", "Hana", "ivan_at_home_42", "", "Kofi")
DESK, PHONE = {"width": 1440, "height": 1500}, {"width": 390, "height": 1800}
ROUNDS, SECONDS, STEPS = 60, 31.0, 30  # that were made, of one, inner steps of one
COLOURS = 128  # of a picture: a third of the bytes, and nothing that one sees
STOP = "Ctrl-C, or decentral leave"


def main(to: Path) -> None:
    """Look at two, four and twelve peers."""
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for many in (2, 4, 12):
            out = Path(folder) / str(many) / "decentral-run"
            make(out, many)
            with (listening := listen(out, Place(port=0), version="0.1.0")).serve_on_thread():
                address = f"http://127.0.0.1:{listening.place.port}/"
                shoot(chromium, address, to / f"page-{many}.png", DESK)
                if many == 4:
                    shoot(chromium, address, to / "page-4-dark.png", DESK, dark=True)
                    shoot(chromium, address, to / "phone-4.png", PHONE)
            if many == 4:
                shoot_terminal(chromium, "watch", ["-m", "decentral", "watch"], out.parent, to)
                shoot_terminal(chromium, "start", ["-m", "tools.pictures", "--live", str(many)], Path.cwd(), to)
        chromium.close()


# ---- a folder as a peer leaves it ----


def make(out: Path, many: int) -> None:
    """Write status, events and metrics of a peer that has made ``ROUNDS`` rounds with the others."""
    out.mkdir(parents=True)
    chance, peers, now = random.Random(many), peers_of(many), time.time()
    write_status(out, status_of(many), ProcessInfo())
    (out / "run.toml").write_text('[model]\ntask = "causal-lm"\n[data]\ncorpus = "sea stories"\n', encoding="utf-8")
    begun = [now - (ROUNDS - number) * SECONDS for number in range(ROUNDS + 1)]
    moments = iter([at for at in begun for _ in range(4)])
    events = EventLog(out, wall=moments.__next__, monotonic=lambda: 0.0)
    metrics = MetricsLog(out)
    events("joined", round=0, resumed=False)
    for number in range(1, ROUNDS + 1):
        here = peers if number > ROUNDS - 6 else peers[: max(2, many - 1)]  # the last one is new
        came = [peer for peer in here if chance.random() > 0.04 or peer == peers[0]]
        took = SECONDS + 4 * chance.random()
        who = {"contributors": came, "members": here, "contributed": True, "leader": chance.choice(here)}
        where = {"round": number, "epoch": 3, "outer_step": number, "fragment": 0, "final": False}
        times = {"seconds": took, "waited": 3 + chance.random(), "sending": 1.9, "applying": 0.2}
        events("commit", **where, **who, **times, ballot=0, votes=len(here) // 2 + 1, record="5f0c" * 16)
        for step in range(0, STEPS, 10):
            loss = 1.3 + 1.6 * math.exp(-(number + step / STEPS) / 18) + 0.08 * chance.random()
            metrics.inner(number * STEPS + step, loss=loss, tokens=1000 * number)
        figures = {"norm_dispersion": 0.2 + 0.05 * chance.random(), "mean_cosine": 0.3 + 0.1 * chance.random()}
        bits = 1.9 + 2.4 * math.exp(-number / 15)
        so_far = {"round": number, "tokens": 30_000 * number, "bytes_sent": 410_000 * number, "diagnosed_round": number}
        metrics.outer(number * STEPS, **so_far, bits_per_byte=bits, debt_ratio=2.1 + 0.1 * chance.random(), **figures)
        if number % 20 == 0:
            events("checkpoint", outer_step=number, bytes=5_100_000)
    events.close()
    metrics.close()


def peers_of(many: int) -> list[str]:
    """Return keys' names, the same every time."""
    return [peer_name(Signer(bytes([number]) * 32).peer) for number in range(many)]


def status_of(many: int) -> Status:
    """Return what the first of them says of itself."""
    peers = peers_of(many)
    paths = ("direct", "direct", "punched", "direct", "relayed")
    ways = [
        {
            "path": paths[n % 5],
            "answers_in": 0.02 + 0.013 * n,
            "seen": 0.7 * n % 4,
            "uplink_bits": 4_000_000 + 700_000 * n,
        }
        for n in range(many)
    ]
    members = tuple(
        {
            "peer": peer,
            "self": not n,
            "live": n != 10,
            "round": ROUNDS - (n == 10),
            "bytes_sent": (390_000 + 1_000 * n) * ROUNDS // max(1, many - 1),
        }
        | {"bytes_received": (400_000 - 9_000 * n) * ROUNDS, **(ways[n] if n else {})}
        for n, peer in enumerate(peers)
    )
    status = Status(
        state="training",
        peer=peers[0],
        name=NAMES[0],
        names={peer: name for peer, name in zip(peers, NAMES, strict=False) if name},
        run="night-shift",
        run_id="c5" * 32,
        algorithm="sparseloco",
        round=ROUNDS,
        rounds=400,
        epoch=3,
        inner_steps=ROUNDS * STEPS,
        members=members,
        usual_round_seconds=SECONDS,
        rounds_seen=ROUNDS,
        rounds_contributed=ROUNDS - 1,
        bytes_sent=410_000 * ROUNDS,
        bytes_received=sum(int(member["bytes_received"]) for member in members[1:]),
        bytes_per_round=410_000,
        sent_per_second=13_000.0,
        received_per_second=13_000.0 * (many - 1),
        max_upload=625_000.0,
        written_today=180_000_000,
        max_writes=2_000_000_000,
        given_rounds=ROUNDS - 1,
        given_tokens=30_000 * ROUNDS,
        given_seconds=SECONDS * ROUNDS,
        given_bytes=410_000 * ROUNDS,
        given_share=1.05 / many,
        uplink_bits=4_600_000,
        next_sync_seconds=12.0,
        seconds_left=340 * SECONDS,
        loss=1.36,
        held_out_loss=1.33,
        num_parameters=12_600_000,
        diagnostics={"norm_dispersion": 0.22, "mean_cosine": 0.36, "debt_ratio": 2.2},
        diagnosed_round=ROUNDS,
        sample={"prompt": "The ship was ", "text": "The ship was not the wind, and the captain said that", "round": 58},
        open_round={
            "round": ROUNDS + 1,
            "members": many,
            "offers": many - 1,
            "leader": peers[1],
            "ballot": 0,
            "votes": None,
        }
        | {"proposed": False, "seconds": 19.0},
        kinds={
            "frame": [390_000 * ROUNDS, 340_000 * ROUNDS * (many - 1)],
            "control": [9_000 * ROUNDS] * 2,
            "lease": [300_000] * 2,
        },
        addresses=("/ip4/203.0.113.7/tcp/4001",),
        reachability="public",
    )
    return replace(status, health=health_sentence(status))


# ---- pictures ----


def shoot(chromium: Browser, address: str, to: Path, size: Any, *, dark: bool = False) -> None:
    """Look at the page once its charts are drawn."""
    page = chromium.new_page(viewport=size, color_scheme="dark" if dark else "light")
    page.goto(address)
    page.locator("#learning canvas").first.wait_for()
    page.locator("#peers tbody tr").first.wait_for()
    page.screenshot(path=to)
    page.close()
    make_small(to)


def shoot_terminal(chromium: Browser, name: str, arguments: list[str], folder: Path, to: Path) -> None:
    """Look at a command in a terminal of 80 x 24."""
    page = chromium.new_page(viewport={"width": 1000, "height": 700})
    command = shlex.join([sys.executable, *arguments])
    tmux("new-session", "-d", "-c", str(folder), "-s", name, "-x", "80", "-y", "24", command)
    before, shown = "", ""
    while "Chiara" not in shown or shown != before:  # it has drawn all
        before, shown = shown, tmux("capture-pane", "-e", "-p", "-t", name)
        page.wait_for_timeout(2000)
    tmux("kill-server")
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(Text.from_ansi(shown), end="")
    page.set_content(console.export_svg(title=f"decentral {name}"))
    page.locator("svg").first.screenshot(path=to / f"{name}.png")
    page.close()
    make_small(to / f"{name}.png")


def show_live(many: int) -> None:
    """Show the live view of ``start`` until somebody presses a key."""
    open_display(sys.stderr, stop=STOP).show(status_of(many))
    sys.stdin.read(1)


def tmux(*arguments: str) -> str:
    """Ask a tmux of our own."""
    asked = ["tmux", "-L", "decentral-pictures", "-f", "/dev/null", *arguments]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout


def make_small(path: Path) -> None:
    """Keep so many colours."""
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)


if __name__ == "__main__":
    show_live(int(sys.argv[2])) if sys.argv[1] == "--live" else main(Path(sys.argv[1]))
