"""A peer's folder, and pages that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from decentral.dashboard.live import LiveFolder
from decentral.dashboard.server import Place, listen
from tests.kit.site import Folder, Site

Serve = Callable[..., Site]
Live = Callable[[Path], LiveFolder]


@pytest.fixture
def live_folder() -> Iterator[Live]:
    """Readers of folders, closed at the end."""
    with ExitStack() as stack:
        yield lambda directory: stack.enter_context(closing(LiveFolder(directory)))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path / "peer")
    made.write()
    yield made
    made.events.close()
    made.metrics.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a directory on a free port until the test ends."""
    with ExitStack() as stack:

        def serve(directory: Path, *, replay: bool = False, **place: Any) -> Site:
            listening = listen(directory, Place(port=0, **place), version="1.2.3", replay=replay, period=0.05)
            stack.enter_context(listening.serve_on_thread())
            return stack.enter_context(closing(Site(listening)))

        yield serve
