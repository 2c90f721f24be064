"""A lab for each test, where there can be one, and calls that are made on its machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from tests.natlab.lab import Lab
from tests.natlab.namespaces import Namespace, Traveller, why_impossible

_WHY = why_impossible()


@pytest.fixture
def lab() -> Iterator[Lab]:
    if _WHY:
        pytest.skip(_WHY)
    with Lab() as made:
        yield made


@pytest.fixture
def away() -> Iterator[Callable[..., Future[Any]]]:
    """Start a call on a machine, in a thread of its own that is in the machine's network with all that it opens."""
    with ThreadPoolExecutor(4) as pool, ExitStack() as stack:

        def start(machine: Namespace, work: Callable[..., Any], *args: Any) -> Future[Any]:
            traveller = stack.enter_context(Traveller())
            return pool.submit(traveller.go, machine.descriptor, lambda: work(*args))

        yield start
