"""A lab for each test, where there can be one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.natlab.lab import Lab
from tests.natlab.namespaces import why_impossible

_WHY = why_impossible()


@pytest.fixture
def lab() -> Iterator[Lab]:
    if _WHY:
        pytest.skip(_WHY)
    with Lab() as made:
        yield made
