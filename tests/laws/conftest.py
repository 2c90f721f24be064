"""All methods of `tables.py` x all shapes x all devices.

Of another package: ``python -m pytest tests/laws --compressor "mine(k=3)"`` runs every law over that one alone, and
``--outer "mine lr=0.5"`` and ``--rule "mine f=2"`` do for an outer optimizer and for an aggregation rule.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decentral.compressors import Compressor, parse_compressor
from decentral.optimizers import Aggregation, OuterMethod
from tests.devices import DEVICES
from tests.kit.tables import AGGREGATIONS, COMPRESSORS, FINE, METHODS, last_of, long_but, method_of, rule_of

TABLES = {"compressor": ("--compressor", COMPRESSORS), "outer": ("--outer", METHODS), "rule": ("--rule", AGGREGATIONS)}


def pytest_addoption(parser: pytest.Parser) -> None:
    for kind, (option, _) in TABLES.items():
        parser.addoption(option, action="append", help=f"one {kind} to run every law over, instead of ours")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "methods(is_meant): a law for those spellings only of which that is true")
    config.addinivalue_line("markers", "rules(is_meant): as methods, of aggregation rules")
    config.addinivalue_line("markers", "one_of_each: in `make test` one spelling of each name, and the others are long")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    given = {kind: _given(metafunc.config, option) for kind, (option, _) in TABLES.items()}
    for kind, (_, ours) in TABLES.items():
        if kind in metafunc.fixturenames and kind not in own:
            table = given[kind] if any(given.values()) else ours
            marker = "rules" if kind == "rule" else "methods"
            meant = [mark.args[0] for mark in metafunc.definition.iter_markers(marker)]
            chosen = [spelling for spelling in table if all(is_meant(spelling) for is_meant in meant)]
            if metafunc.definition.get_closest_marker("one_of_each"):
                chosen = chosen if any(given.values()) else _long_but_the_first(chosen)
            metafunc.parametrize(kind, chosen, indirect=True)


def _long_but_the_first(spellings: list[str]) -> list[Any]:  # Any: pytest does not name what it takes
    """Of each name, or chain of names, the first spelling is in ``make test``."""
    names = [" >> ".join(part.split("(")[0].split()[0] for part in spelling.split(" >> ")) for spelling in spellings]
    firsts = {name: spelling for name, spelling in zip(reversed(names), reversed(spellings), strict=True)}
    return long_but(tuple(firsts.values()), spellings)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With methods of another package, only what is asked of them."""
    given = {kind: _given(config, option) for kind, (option, _) in TABLES.items()}
    if any(given.values()):
        items[:] = [item for item in items if _is_about(item, given)]


def _given(config: pytest.Config, option: str) -> list[str]:
    return config.getoption(option, None) or []  # None where another folder's tests were asked for


def _is_about(item: pytest.Item, given: dict[str, list[str]]) -> bool:
    chosen = item.callspec.params if hasattr(item, "callspec") else {}
    return any(chosen.get(kind) in spellings for kind, spellings in given.items())


@pytest.fixture
def outer(request: pytest.FixtureRequest) -> OuterMethod:
    return method_of(request.param)


@pytest.fixture
def rule(request: pytest.FixtureRequest) -> Aggregation:
    return rule_of(request.param)


@pytest.fixture
def compressor(request: pytest.FixtureRequest) -> Compressor:
    return parse_compressor(request.param)


@pytest.fixture
def fine(compressor: Compressor) -> bool:
    return last_of(str(compressor)) in FINE


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def gaussian(device: str) -> Callable[..., Tensor]:
    """``gaussian(shape, seed)``: the same numbers on every device."""

    def make(shape: tuple[int, ...], seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(device)

    return make


@pytest.fixture
def integers(device: str) -> Callable[..., Tensor]:
    """``integers(shape, seed)``: whole numbers from -500 to 500, as float32."""

    def make(shape: tuple[int, ...], seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-500, 501, shape, generator=generator).float().to(device)

    return make


def _outlier(numel: int) -> Tensor:
    flat = torch.full((numel,), 1e-3)
    flat[numel // 2 : numel // 2 + 1] = 1e4
    return flat


EXTREMES: dict[str, Callable[[int], Tensor]] = {
    "zeros": torch.zeros,
    "minus zeros": lambda numel: -torch.zeros(numel),
    "a constant": lambda numel: torch.full((numel,), 0.3),
    "a negative constant": lambda numel: torch.full((numel,), -math.pi),
    "the smallest denormal": lambda numel: torch.full((numel,), 2.0**-149),
    "denormals": lambda numel: torch.linspace(-1e-39, 1e-39, numel),
    "around 1e38": lambda numel: torch.linspace(-1e38, 1e38, numel),
    "the largest float": lambda numel: torch.full((numel,), torch.finfo(torch.float32).max),
    "one outlier": _outlier,
    "both ends of the range": lambda numel: torch.logspace(-44, 38, numel, dtype=torch.float64).float(),
}


@pytest.fixture(params=EXTREMES)
def extreme(request: pytest.FixtureRequest) -> Callable[[int], Tensor]:
    """A function from a number of elements to a flat tensor at some edge of float32."""
    return EXTREMES[request.param]
