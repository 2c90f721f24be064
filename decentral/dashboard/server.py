"""What the browser asks for: the page, its parts as JSON, and a stream of server-sent events. Starlette; no state but
readers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio.to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from decentral.dashboard.folders import chosen, peers_in
from decentral.dashboard.guard import Guard
from decentral.dashboard.hub import PERIOD, Hub, as_json
from decentral.dashboard.live import LiveFolder
from decentral.dashboard.replay import Replay
from decentral.errors import DecentralError
from decentral.observe.status import read_status

STATIC = Path(__file__).parent / "static"
MOST_VIEWERS = 16  # streams at a time: more are told to come later, so that a page costs a bounded part of a core
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
        """The application, guarded."""
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
        """All parts at once; in a replay as of ``round``."""
        name, folder = self._asked(request)
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
        """Parts of a replay; reads whole files, on a thread."""
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
        """Server-sent events, one per part that changed; a comment where none did, so that a dead viewer is noticed."""
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

    def _asked(self, request: Request) -> tuple[str | None, Path | None]:
        return self._choose(request.query_params.get("peer"))

    def _choose(self, asked: str | None) -> tuple[str | None, Path | None]:
        folders = peers_in(self._directory)
        name = chosen(folders, asked)
        return name, None if name is None else folders[name]

    def _hub(self, folder: Path) -> Hub:
        if folder not in self._hubs:
            self._hubs[folder] = Hub(LiveFolder(folder), self._period)
        return self._hubs[folder]

    def _page(self, name: str | None, folder: Path | None) -> str:
        """What belongs to no peer: which there are, and whether this is a replay."""
        span = None
        if self._replay and folder in self._replays:
            span = self._replays[folder].span
        folders = [{"name": one, "word": _word(path)} for one, path in peers_in(self._directory).items()]
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


def _word(folder: Path) -> str:
    try:
        return read_status(folder).state
    except DecentralError:
        return ""


def _message(parts: Mapping[str, str]) -> str:
    return "".join(f"event: {part}\ndata: {text}\n\n" for part, text in parts.items())


def _object(parts: Mapping[str, str]) -> str:
    """One object of texts that are JSON already."""
    return "{" + ",".join(f'"{part}":{text}' for part, text in parts.items()) + "}"
