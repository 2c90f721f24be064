"""The server of the page: the page, its parts as JSON, and a stream of server-sent events. Starlette; no state but
readers.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import math
import secrets
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs

import anyio
import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decentral.dashboard.live import LiveFolder, Replay, choose_folder, peers_in
from decentral.errors import DecentralError, UsageError
from decentral.observe.lines import json_value
from decentral.observe.status import read_status

# ---- the page ----

PERIOD = 1.0  # s between two looks: as often as a peer writes its status
STATIC = Path(__file__).parent / "static"
MOST_VIEWERS = 16  # streams at a time: more are told to come later, so that a page costs a bounded part of a core


def as_json(value: Any) -> str:
    """Return strict JSON on one line, whatever the files had."""
    return json.dumps(json_value(value), separators=(",", ":"), allow_nan=False)


_NOTHING = {
    "now": as_json({"health": "nothing: no peer has run here yet; the page goes on by itself", "word": "nothing"})
}


class Page:
    """The pages of the folders in ``directory``, live or, with ``replay``, of runs that are over."""

    def __init__(self, directory: Path, *, version: str, replay: bool = False, period: float = PERIOD) -> None:
        self._directory, self._version, self._replay, self._period = directory, version, replay, period
        self._hubs: dict[Path, Hub] = {}
        self._replays: dict[Path, Replay] = {}
        self._viewers = 0

    def app(self, *, token: str | None, port: int) -> ASGIApp:
        """Return the application, guarded."""
        routes = [
            Route("/", self._index),
            Route("/api/view", self._view),
            Route("/api/stream", self._stream),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        return Guard(Starlette(routes=routes), token=token, port=port)

    def close(self) -> None:
        """Close what is open, once nobody is served any more."""
        for hub in self._hubs.values():
            hub.close()
        self._hubs.clear()

    async def _index(self, request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def _view(self, request: Request) -> Response:
        """Answer with all parts at once; in a replay as of ``round``."""
        name, folder = self._folder_of_request(request)
        try:
            parts = await self._parts(folder, request.query_params.get("round"))
        except DecentralError as error:
            parts = {"now": as_json({"health": str(error), "word": "nothing"})}
        page = await anyio.to_thread.run_sync(self._page, name, folder)
        return Response(_object({"page": page, **parts}), media_type="application/json")

    async def _parts(self, folder: Path | None, asked: str | None) -> Mapping[str, str]:
        if folder is None:
            return _NOTHING
        if not self._replay:
            return await self._hub(folder).now()
        round_ = int(asked) if asked is not None and asked.isdecimal() and len(asked) < 12 else None
        return await anyio.to_thread.run_sync(self._at, folder, round_)

    def _at(self, folder: Path, round_: int | None) -> Mapping[str, str]:
        """Return the parts of a replay; reads whole files, on a thread."""
        if folder not in self._replays:
            self._replays[folder] = Replay(folder)
        return {part: as_json(value) for part, value in self._replays[folder].at(round_).items()}

    async def _stream(self, request: Request) -> Response:
        if self._replay:
            return PlainTextResponse("a replay has no stream\n", 404)
        if self._viewers >= MOST_VIEWERS:
            return PlainTextResponse("too many viewers; close a page\n", 503, {"retry-after": "10"})
        self._viewers += 1
        return _Stream(self._events(request.query_params.get("peer")), self._viewer_left)

    def _viewer_left(self) -> None:
        self._viewers -= 1

    async def _events(self, asked: str | None) -> AsyncIterator[str]:
        """Yield server-sent events, one per part that changed; a comment where none did, so that a dead viewer is
        noticed.
        """
        last_page = ""
        folder: Path | None = None
        while folder is None:  # none has run here yet, or not the one that was asked for
            name, folder = self._choose(asked)
            page = await anyio.to_thread.run_sync(self._page, name, folder)
            yield _message({"page": page, **({} if folder else _NOTHING)})
            last_page = page
            if folder is None:
                await anyio.sleep(self._period)
        async with aclosing(self._hub(folder).changes()) as changes:
            async for fresh in changes:
                page = await anyio.to_thread.run_sync(self._page, name, folder)
                parts = fresh if page == last_page else {"page": page, **fresh}
                last_page = page
                yield _message(parts) or ": nothing new\n\n"

    def _folder_of_request(self, request: Request) -> tuple[str | None, Path | None]:
        return self._choose(request.query_params.get("peer"))

    def _choose(self, asked: str | None) -> tuple[str | None, Path | None]:
        folders = peers_in(self._directory)
        name = choose_folder(folders, asked)
        return name, None if name is None else folders[name]

    def _hub(self, folder: Path) -> Hub:
        if folder not in self._hubs:
            self._hubs[folder] = Hub(LiveFolder(folder), self._period)
        return self._hubs[folder]

    def _page(self, name: str | None, folder: Path | None) -> str:
        """Return what belongs to no peer: which there are, and whether this is a replay."""
        span = None
        if self._replay and folder in self._replays:
            span = self._replays[folder].span
        folders = [{"name": one, "word": _state_of(path)} for one, path in peers_in(self._directory).items()]
        return as_json(
            {"version": self._version, "folder": name, "folders": folders, "live": not self._replay, "replay": span}
        )


class _Stream(StreamingResponse):
    """Says when it is over, however it ends."""

    def __init__(self, events: AsyncIterator[str], left: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        self._left = left

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            self._left()


def _state_of(folder: Path) -> str:
    try:
        return read_status(folder).state
    except DecentralError:
        return ""


def _message(parts: Mapping[str, str]) -> str:
    return "".join(f"event: {part}\ndata: {text}\n\n" for part, text in parts.items())


def _object(parts: Mapping[str, str]) -> str:
    """Return an object of texts that are JSON already."""
    return "{" + ",".join(f'"{part}":{text}' for part, text in parts.items()) + "}"


# ---- viewers of one folder ----
#
# They share one reader, which reads only while somebody looks.
#
# A viewer is told what has changed since it was last told: one that is slow skips what is old, and nothing queues up.


class Reader(Protocol):
    """Where a folder's parts come from."""

    def look(self) -> Mapping[str, Any]:
        """Return all parts; blocks while it reads."""
        ...

    def close(self) -> None:
        """Close the files: nobody will ask any more."""
        ...


class Hub:
    """The viewers of one folder, all on one event loop.

    Between two viewers the reader is kept: it goes on where it was, and its memory is bounded.
    """

    def __init__(self, reader: Reader, period: float = PERIOD) -> None:
        self._reader, self._period = reader, period
        self._looking = anyio.Lock()
        self._looked_at = -math.inf
        self._seen: dict[str, Any] = {}
        self._told: dict[str, tuple[int, str]] = {}  # by part: its number, its text
        self._number = 0

    async def changes(self) -> AsyncGenerator[dict[str, str], None]:
        """Yield the changes as JSON by part: at first all parts, then what is new; empty when nothing is."""
        known: dict[str, int] = {}
        while True:
            await self._look()
            fresh = {part: told for part, told in self._told.items() if known.get(part) != told[0]}
            known |= {part: number for part, (number, _) in fresh.items()}
            yield {part: text for part, (_, text) in fresh.items()}
            await anyio.sleep(self._period)

    async def now(self) -> dict[str, str]:
        """Return all parts as they are."""
        await self._look()
        return {part: text for part, (_, text) in self._told.items()}

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    async def _look(self) -> None:
        """Read, if nobody has for a period."""
        async with self._looking:
            if anyio.current_time() - self._looked_at < 0.9 * self._period:
                return
            parts = await anyio.to_thread.run_sync(self._reader.look)
            self._looked_at = anyio.current_time()
            for part, value in parts.items():
                if self._seen.get(part) is not value:
                    self._take(part, value)

    def _take(self, part: str, value: Any) -> None:
        self._seen[part] = value
        text = as_json(value)
        if part not in self._told or self._told[part][1] != text:
            self._number += 1
            self._told[part] = (self._number, text)


# ---- a guard: who may look ----
#
# An ASGI layer in front of everything that the page serves.
#
# Read-only: GET and HEAD. On this machine alone only names of this machine are answered, or a site that a browser has
# open could rebind its own name to 127.0.0.1 and read along. Where others can reach it, a token is asked for instead:
# in the address once, then in a cookie that no script reads. Every answer carries headers that keep foreign code out.
#
# Nor may another site use up what there is for viewers: it cannot read, but 16 of its requests took all places. What
# a browser says of where a request comes from no script can change; who says nothing is an old one, or none.

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
_HERE = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address to listen at."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Lets through what may look at ``inner``; ``token``: None where this machine alone can ask."""

    def __init__(self, inner: ASGIApp, *, token: str | None, port: int) -> None:
        self._inner, self._token = inner, token
        self._cookie = f"decentral_{port}"  # cookies know no ports: two pages of one machine have one each

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand on."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._inner(scope, receive, send)
            return
        answer = self._verdict(scope) or self._inner

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await answer(scope, receive, send_with_headers)

    def _verdict(self, scope: Scope) -> Response | None:
        """Return an answer of our own; None: go on."""
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page only shows\n", 405, {"allow": "GET, HEAD"})
        if _is_of_another_site(headers, scope["path"]):
            return PlainTextResponse("this is for the page itself: open its address\n", 403)
        if self._token is None:
            return None if _host_asked(headers) in _HERE else PlainTextResponse("ask for it by localhost\n", 421)
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token")
        if given and self._is_token(given[0]):
            redirect = RedirectResponse(scope["path"], 303)
            redirect.set_cookie(self._cookie, given[0], httponly=True, samesite="strict")
            return redirect
        if self._is_token(self._shown(headers)):
            return None
        return PlainTextResponse("open the address with ?token=..., as decentral dashboard printed it\n", 401)

    def _shown(self, headers: Headers) -> str:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return bearer.strip()
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return ""
        return found.value if found is not None else ""

    def _is_token(self, given: str) -> bool:
        """Compare in constant time, whatever was given."""
        return self._token is not None and hmac.compare_digest(given.encode(), self._token.encode())


def _is_of_another_site(headers: Headers, path: str) -> bool:
    """Tell whether a page from elsewhere asks, and not a person who follows its link to this page.

    Another port of this machine is ``same-site``, and as foreign.
    """
    if headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return False
    follows = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    return not follows or path.startswith("/api/")


def _host_asked(headers: Headers) -> str:
    """Return the name that was asked for, without its port."""
    host = headers.get("host", "").lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


# ---- listening ----
#
# In the foreground for ``decentral dashboard``, on a thread beside the training for ``--dashboard``.

PORT = 7070
_EVERYWHERE = ("0.0.0.0", "::")  # nobody can be asked for by that name
_END_SECONDS = 1  # for streams to end; then they are cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the page listens, and who may look."""

    host: str = "127.0.0.1"
    port: int = PORT
    token: str | None = None  # None: none is needed where only this machine can ask, one is made else

    def with_token(self) -> Place:
        """Return the place with a token where one is needed."""
        token = self.token or (None if is_loopback(self.host) else secrets.token_urlsafe(16))
        return Place(host=self.host, port=self.port, token=token)

    @property
    def address(self) -> str:
        """Return the address for a browser."""
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
        """Return a server that does not run yet."""
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
        """Serve until Ctrl-C."""
        try:
            self.server().run(sockets=[self.bound])
        finally:
            self.close()

    @contextmanager
    def serve_on_thread(self) -> Iterator[None]:
        """Serve on a thread, as long as the block lasts."""
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
        """Close what is open, once the server has ended."""
        self.bound.close()
        self.page.close()


def listen(directory: Path, place: Place, *, version: str, replay: bool = False, period: float = PERIOD) -> Listening:
    """Bind now, so that a port that is taken is said before anything else is done. UsageError."""
    settled = place.with_token()
    family = socket.AF_INET6 if ":" in settled.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((settled.host, settled.port))
        bound.listen(64)  # who opens the page before the server has begun waits a moment
    except OSError as error:
        bound.close()
        where = f"{settled.host}:{settled.port}"
        other = "--host, one of this machine" if error.errno == errno.EADDRNOTAVAIL else "--port"
        raise UsageError(f"the page cannot listen at {where} ({error.strerror}); choose another {other}") from error
    got = Place(host=settled.host, port=bound.getsockname()[1], token=settled.token)
    return Listening(Page(directory, version=version, replay=replay, period=period), got, bound)
