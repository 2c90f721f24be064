"""The tables of all methods x all shapes x all devices: a new method costs one line and gets every law.

Of another package: ``python -m pytest tests/laws --compressor "mine(k=3)"`` runs every law over that one alone, and
``--outer "mine lr=0.5"`` does for an outer optimizer.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decentral.compressors import Compressor, parse_compressor
from decentral.optimizers import make_outer

COMPRESSORS = [
    "none",
    "fp16",
    "bf16",
    "int8(block=4096)",
    "int8(block=7)",
    "int4(block=256)",
    "int4(block=5)",
    "nf4(block=64)",
    "nf4(block=7)",
    "fp8(block=256)",
    "fp8(block=3)",
    "sign(block=1024)",
    "sign(block=9)",
    "codebook8",
    "sparseloco2",
    "qsgd(levels=7, block=256, seed=0)",
    "qsgd(levels=127, block=5, seed=3)",
    "natural(seed=0)",
    "e3m0(block=256)",
    "e3m0(block=5)",
    "signmag2",
    "topk(k=64, chunk=4096)",
    "topk(k=1, chunk=16)",
    "topk(k=256, chunk=256)",
    "topk(k=64, chunk=4096) >> signmag2",
    "topk(k=64, chunk=4096) >> int8(block=64)",
    "topk(k=3, chunk=64) >> e3m0(block=6)",
    "topk(k=64, chunk=4096) >> fp16",
    "topk(k=64, chunk=4096) >> qsgd(levels=7, block=64, seed=0)",
    "topk(k=64, chunk=4096) >> sparseloco2",
    "topk(k=64, chunk=4096) >> codebook8",
    "threshold(k=64, sample=0.01)",
    "threshold(k=640, sample=1.0) >> signmag2",
    "threshold(k=64, sample=0.01) >> int8(block=64)",
    "lowrank(rank=4, iterations=4)",
    "lowrank(rank=17, iterations=1)",
    "dct(k=64, chunk=4096)",
    "dct(k=5, chunk=49) >> int8(block=64)",
    "dct(k=64, chunk=4096) >> signmag2",
    "randk(k=64, chunk=4096, seed=0)",
    "randk(k=7, chunk=50, seed=3) >> int8(block=64)",
    "randk(k=64, chunk=4096, seed=0) >> signmag2",
]
OUTER = [
    "diloco",
    "diloco lr=1 momentum=0",
    "streaming",
    "sparseloco",
    "sparseloco lr=0.3",
    "noloco",
    "noloco alpha=0 beta=1 gamma=1",
]
# Laws that a method cannot keep, by its name, and why.
FOLLOWS = ("int8", "codebook8", "sparseloco2", "qsgd")  # levels follow what is sent, so what arrived has others
LOPSIDED = ("nf4", "sparseloco2")  # published with more levels on one side of zero than on the other
FINE = ("fp8", "nf4", "codebook8", "sparseloco2")  # levels have so many bits that a debt is rounded to float32

SHAPES = [
    (),
    (1,),
    (0,),
    (3, 0),
    (13,),
    (4095,),
    (4096,),
    (4097,),
    (64, 64),
    (1, 5000),
    (67, 131),
    (128, 65),
    (3, 5, 7, 11),
    (2, 3, 4099),
]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


TABLES = {"compressor": ("--compressor", COMPRESSORS), "outer": ("--outer", OUTER)}


def pytest_addoption(parser: pytest.Parser) -> None:
    for kind, (option, _) in TABLES.items():
        parser.addoption(option, action="append", help=f"one {kind} to run every law over, instead of ours")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "methods(is_meant): a law for those spellings only of which that is true")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    meant = [mark.args[0] for mark in metafunc.definition.iter_markers("methods")]
    for kind, (option, ours) in TABLES.items():
        if kind in metafunc.fixturenames and kind not in own:
            table = _given(metafunc.config, option) or ours
            chosen = [spelling for spelling in table if all(is_meant(spelling) for is_meant in meant)]
            metafunc.parametrize(kind, chosen, indirect=True)


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
def outer(request: pytest.FixtureRequest) -> Any:
    """The outer optimizer of ``name key=number ...``."""
    name, *hyper = request.param.split()
    return make_outer(name, {key: float(number) for key, _, number in (word.partition("=") for word in hyper)})


@pytest.fixture
def compressor(request: pytest.FixtureRequest) -> Compressor:
    return parse_compressor(request.param)


def _last(compressor: Compressor) -> str:
    """The name of the method, or of the quantiser of a chain."""
    return str(compressor).split(" >> ")[-1].split("(")[0]


@pytest.fixture
def follows(compressor: Compressor) -> bool:
    return _last(compressor) in FOLLOWS


@pytest.fixture
def lopsided(compressor: Compressor) -> bool:
    return _last(compressor) in LOPSIDED


@pytest.fixture
def fine(compressor: Compressor) -> bool:
    return _last(compressor) in FINE


@pytest.fixture
def shape() -> None:
    """Each of SHAPES in turn: see below."""


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A law goes through all shapes within one test: a test for each were 10,500, and took 40 % longer."""
    names = pyfuncitem._fixtureinfo.argnames
    if "shape" not in names or "shape" in pyfuncitem.callspec.params:
        return None
    given = {name: pyfuncitem.funcargs[name] for name in names}
    for shape in SHAPES:
        try:
            pyfuncitem.obj(**given | {"shape": shape})
        except BaseException as error:
            error.add_note(f"shape: {shape}")
            raise
    return True


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
