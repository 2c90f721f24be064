"""Listens: in the foreground for ``decentral dashboard``, on a thread beside the training for ``--dashboard``."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from decentral.dashboard.guard import is_loopback
from decentral.dashboard.hub import PERIOD
from decentral.dashboard.server import Page
from decentral.errors import UsageError

PORT = 7070
_EVERYWHERE = ("0.0.0.0", "::")  # nobody can be asked for by that name
_END_SECONDS = 1  # for streams to end; then they are cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the page listens, and who may look."""

    host: str = "127.0.0.1"
    port: int = PORT
    token: str | None = None  # None: none is needed where only this machine can ask, one is made else

    def settled(self) -> Place:
        """With a token where one is needed."""
        token = self.token or (None if is_loopback(self.host) else secrets.token_urlsafe(16))
        return Place(host=self.host, port=self.port, token=token)

    @property
    def address(self) -> str:
        """For a browser."""
        name = socket.gethostname() if self.host in _EVERYWHERE else self.host
        host = f"[{name}]" if ":" in name else name
        return f"http://{host}:{self.port}/" + (f"?token={self.token}" if self.token else "")


@dataclass(frozen=True, slots=True)
class Listening:
    """A socket that is bound and the page that will answer there."""

    page: Page
    place: Place  # its port is the one that was got
    bound: socket.socket

    def server(self) -> uvicorn.Server:
        """Not running yet."""
        app = self.page.app(token=self.place.token, port=self.place.port)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=_END_SECONDS,
        )
        return uvicorn.Server(config)

    def serve(self) -> None:
        """Until Ctrl-C."""
        try:
            self.server().run(sockets=[self.bound])
        finally:
            self.close()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """On a thread, as long as the block lasts."""
        server = self.server()
        thread = threading.Thread(target=server.run, args=([self.bound],), name="dashboard", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.should_exit = True
            thread.join(_END_SECONDS + 2)
            self.close()

    def close(self) -> None:
        """Once the server has ended."""
        self.bound.close()
        self.page.close()


def listen(directory: Path, place: Place, *, version: str, replay: bool = False, period: float = PERIOD) -> Listening:
    """Bind now, so that a port that is taken is said before anything else is done. UsageError."""
    settled = place.settled()
    family = socket.AF_INET6 if ":" in settled.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((settled.host, settled.port))
        bound.listen(64)  # who opens the page before the server has begun waits a moment
    except OSError as error:
        bound.close()
        where = f"{settled.host}:{settled.port}"
        raise UsageError(f"the page cannot listen at {where} ({error.strerror}); choose another --port") from error
    got = Place(host=settled.host, port=bound.getsockname()[1], token=settled.token)
    return Listening(Page(directory, version=version, replay=replay, period=period), got, bound)
