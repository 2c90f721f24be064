"""A folder as a peer leaves it, and a page that really listens."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decentral.dashboard.live import LiveFolder
from decentral.dashboard.server import Listening
from decentral.observe.events import EventLog
from decentral.observe.metrics import MetricsLog
from decentral.observe.status import ProcessInfo, Status, write_status
from tests.kit.patience import PATIENCE

GOLDEN = Path(__file__).parents[1] / "golden" / "run-of-a-demo"  # a peer of a demo that lost one member and got one
ME, OTHER, THIRD = (f"12D3KooW{name * 6}" for name in "abc")


@dataclass
class Folder:
    """Writes as a peer does."""

    path: Path
    made: int = 0
    status: Status = field(default_factory=lambda: Status(state="training", peer=ME, run="a run", algorithm="diloco"))

    def __post_init__(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.events, self.metrics = EventLog(self.path), MetricsLog(self.path)

    def write(self, **changes: Any) -> None:
        """Its status, as of this very process."""
        for name, value in changes.items():
            object.__setattr__(self.status, name, value)
        write_status(self.path, self.status, ProcessInfo())

    def round(self, *contributors: str, members: tuple[str, ...] = (ME, OTHER), **more: Any) -> None:
        """One more commit."""
        self.made += 1
        where = {"round": self.made, "epoch": 0, "outer_step": self.made, "fragment": 0, "final": False}
        who = {"contributors": [*contributors], "members": [*members], "contributed": ME in contributors}
        self.events("commit", **where, **who, **more)
        self.metrics.outer(10 * self.made, round=self.made, tokens=100 * self.made, bytes_sent=1000 * self.made)


def looked(directory: Path) -> dict[str, Any]:
    """What the page shows of a folder now."""
    with closing(LiveFolder(directory)) as live:
        return dict(live.look())


@dataclass
class Site:
    """Asks a page over a socket, as a browser would."""

    listening: Listening
    connections: dict[http.client.HTTPResponse, http.client.HTTPConnection] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return self.listening.place.port

    def ask(self, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
        """The answer, its body unread."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        self.connections[answer] = connection
        return answer

    def hang_up(self, answer: http.client.HTTPResponse) -> None:
        """Close what an answer comes by."""
        answer.close()
        self.connections.pop(answer).close()

    def close(self) -> None:
        """Close everything."""
        for answer in list(self.connections):
            self.hang_up(answer)

    def text(self, path: str, **headers: str) -> str:
        return self.ask(path, **headers).read().decode()

    def view(self, **asked: object) -> dict[str, Any]:
        found = json.loads(self.text("/api/view?" + "&".join(f"{key}={value}" for key, value in asked.items())))
        assert isinstance(found, dict)
        return found

    def told(self, answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
        """Server-sent events, as they come."""
        event = ""
        for line in answer:
            word, _, rest = line.decode().rstrip("\n").partition(": ")
            if word == "event":
                event = rest
            elif word == "data":
                yield event, json.loads(rest)
