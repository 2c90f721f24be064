"""A peer's folder, and the view of it driven by keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.site import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path / "peer")
    made.write()
    yield made
    made.events.close()
    made.metrics.close()
