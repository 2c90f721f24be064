"""Tensors at the edges of what a method may be given: a bound that only ordinary tensors keep is no bound."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Shape = tuple[int, ...]
Edge = Callable[[Shape, torch.Generator], Tensor]

LARGEST = torch.finfo(torch.float32).max
SMALLEST = 2.0**-149
SHAPES: list[Shape] = [(1,), (2,), (13,), (95,), (256,), (4097,), (8191,), (8192,), (50, 16), (67, 131), (40, 1)]


def _gaussian(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _uniform(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def _scaled_rows(shape: Shape, generator: torch.Generator) -> Tensor:
    """Every row has a power of two of its own, within 2**140."""
    rows = 2.0 ** (-140 * _uniform((*shape[:-1], 1), generator))
    return _gaussian(shape, generator) * rows


def _one_value(shape: Shape, generator: torch.Generator) -> Tensor:
    tensor = torch.zeros(shape, dtype=torch.float64)
    tensor.view(-1)[tensor.numel() // 2] = -0.7
    return tensor


def _outlier(shape: Shape, generator: torch.Generator) -> Tensor:
    tensor = _gaussian(shape, generator) * 1e-7
    tensor.view(-1)[tensor.numel() // 3] = 1e4
    return tensor


def _whole(least: int, below: int) -> Edge:
    return lambda shape, generator: torch.randint(least, below, shape, generator=generator).double()


EDGES: dict[str, Edge] = {
    "gaussian": _gaussian,
    "heavy tails": lambda shape, generator: _gaussian(shape, generator) ** 5,
    "mostly zeros": lambda shape, generator: _gaussian(shape, generator) * (_uniform(shape, generator) < 0.01),
    "far from zero": lambda shape, generator: _gaussian(shape, generator) * 0.01 + 3,
    "neighbouring floats": lambda shape, generator: 3 + _whole(0, 4)(shape, generator) * 2.0**-22,
    "two neighbouring floats": lambda shape, generator: 3 + _whole(1, 3)(shape, generator) * 2.0**-22,
    "values of very different size": lambda shape, generator: (
        _gaussian(shape, generator).sign() * 2.0 ** (_uniform(shape, generator) * 275 - 149)
    ),
    "rows of very different size": _scaled_rows,
    "one value": _one_value,
    "one outlier": _outlier,
    "a constant": lambda shape, generator: torch.full(shape, 0.3, dtype=torch.float64),
    "zeros": lambda shape, generator: torch.zeros(shape, dtype=torch.float64),
    "powers of two": lambda shape, generator: 2.0 ** _whole(-149, 128)(shape, generator),
    "the smallest denormal": lambda shape, generator: torch.full(shape, SMALLEST, dtype=torch.float64),
    "the smallest denormal or zero": lambda shape, generator: _whole(0, 2)(shape, generator) * SMALLEST,
    "few denormals": lambda shape, generator: _whole(-8, 9)(shape, generator) * SMALLEST,
    "denormals": lambda shape, generator: _gaussian(shape, generator) * 2.0**-132,
    "denormal scales": lambda shape, generator: _gaussian(shape, generator) * 2.0**-123,
    "the largest floats": lambda shape, generator: torch.full(shape, LARGEST, dtype=torch.float64),
    "the largest floats and their negatives": lambda shape, generator: LARGEST * _gaussian(shape, generator).sign(),
    "nearly the largest floats": lambda shape, generator: LARGEST * (1 - _uniform(shape, generator) / 50),
    "up to the largest float": lambda shape, generator: LARGEST * (2 * _uniform(shape, generator) - 1),
}


def each_edge() -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its name, float32, the same numbers every time."""
    for name, make in EDGES.items():
        for shape in SHAPES:
            generator = torch.Generator().manual_seed(math.prod(shape))
            yield f"{name} {shape}", make(shape, generator).clamp(-LARGEST, LARGEST).float()
