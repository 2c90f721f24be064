"""What ``start --dashboard`` costs inside a peer that trains: processor time of the page's own threads.

    python -m experiments.cost.page --seconds 60

The real command runs in this process, alone, on a small model that makes some rounds a second; the page's thread and
those that read files for it are told apart by their event loop. Viewers are real connections to the stream of events.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

from decentral.cli import main
from decentral.manifest import preset_manifest

NOBODY = threading.Event()  # wakes nobody: only time passes
TICKS = os.sysconf("SC_CLK_TCK")
LISTEN = ["--listen", "/ip4/127.0.0.1/tcp/0", "--transport", "native", "--no-lan"]


def spent(native_id: int) -> float:
    """Seconds of processor of one thread of this process."""
    try:
        fields = Path(f"/proc/self/task/{native_id}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:  # it ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def of_the_page() -> list[int]:
    """The page's thread, and those that read for it: anyio's workers that no swarm started."""
    found = []
    for thread in threading.enumerate():
        starter: Any = getattr(thread, "loop", None)  # Any: anyio's worker threads are not typed
        served = starter is not None and getattr(starter, "_thread_id", None) == _page_ident()
        if thread.native_id is not None and (thread.name == "dashboard" or served):
            found.append(thread.native_id)
    return found


def _page_ident() -> int | None:
    return next((thread.ident for thread in threading.enumerate() if thread.name == "dashboard"), None)


def share(seconds: float) -> float:
    """Of one core, over so long."""
    before = {thread: spent(thread) for thread in of_the_page()}
    NOBODY.wait(seconds)
    return sum(spent(thread) - before.get(thread, 0.0) for thread in of_the_page()) / seconds


def view(address: str, over: threading.Event) -> None:
    """Look at the page until it is over."""
    with urllib.request.urlopen(f"{address}/api/stream", timeout=30) as stream:
        while not over.is_set() and stream.readline():
            pass


def measure(out: Path, seconds: float) -> None:
    """From another thread, while the peer trains on the main one."""
    while _page_ident() is None or not (out / "metrics.jsonl").exists():
        NOBODY.wait(0.5)
    NOBODY.wait(10)
    address, over = "http://127.0.0.1:7070", threading.Event()
    found = {"nobody": share(seconds)}
    viewers = [threading.Thread(target=view, args=(address, over), daemon=True) for _ in range(3)]
    for viewer in viewers:
        viewer.start()
    NOBODY.wait(3)
    found["three_viewers"] = share(seconds)
    looking = sum(viewer.is_alive() for viewer in viewers)
    over.set()
    rounds = len((out / "metrics.jsonl").read_text().splitlines())
    print(json.dumps({"share_of_a_core": found, "viewers": looking, "rounds": rounds, "load": os.getloadavg()[0]}))
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    manifest = preset_manifest(
        "diloco",
        run={"rounds": 10**6},
        model={"hidden": 64, "layers": 2, "heads": 2, "context": 64},
        inner={"steps": 20},
        data={"batch_size": 4},
    )
    (folder / "run.toml").write_text(manifest.to_toml())
    threading.Thread(target=measure, args=(folder / "run", given.seconds), daemon=True).start()
    main(["start", str(folder / "run.toml"), "--alone", "--dashboard", "--out", str(folder / "run"), *LISTEN])
