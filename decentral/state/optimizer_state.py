"""torch's nested state (optimizers, schedulers, generators) as tensors plus JSON, and back, bit for bit.

``state_dict()`` mixes tensors with dicts that have integer keys, tuples and floats like inf, which JSON
alone would change silently. Every value is tagged instead; an unknown type is an error now and not a
surprise at resume.
"""

import math
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from decentral.errors import ConfigError

Tree = Any  # nested dict, list, tuple, str, int, float, bool, None, Tensor: torch has no closer type
Json = Any

MAX_DEPTH = 32  # far above any state_dict; a cycle is found instead of overflowing the stack


def flatten(tree: Tree, prefix: str) -> tuple[dict[str, Tensor], Json]:
    """Split a state into tensors (CPU copies, named ``prefix/0``, ``prefix/1``...) and a JSON document.

    The copies are the snapshot: training may go on while another thread writes them.

    Raises:
        ConfigError: a value that is none of the types above, named by its place.

    """
    tensors: dict[str, Tensor] = {}
    return tensors, _encode(tree, prefix, tensors, place=prefix, depth=0)


def unflatten(document: Json, tensors: Mapping[str, Tensor]) -> Tree:
    """Inverse of ``flatten``; ``tensors`` may hold others too. Raises ConfigError on another document."""
    try:
        return _decode(document, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"stored state does not decode ({type(error).__name__}: {error}); another version wrote it"
        ) from error


def random_state() -> Tree:
    """States of torch's (CPU and CUDA), Python's and numpy's global generators, for ``flatten``."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
    }


def set_random_state(tree: Tree) -> None:
    """Put the generators back. CUDA states are used for as many devices as are here now."""
    torch.set_rng_state(tree["torch"])
    if torch.cuda.is_available():
        for device, state in enumerate(tree["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
    random.setstate(tree["python"])
    numpy.random.set_state(tree["numpy"])


def _encode(tree: Tree, prefix: str, tensors: dict[str, Tensor], *, place: str, depth: int) -> Json:
    if depth > MAX_DEPTH:
        raise ConfigError(f"{place}: nested deeper than {MAX_DEPTH} levels; a state must be a tree")
    if tree is None or isinstance(tree, bool | str) or type(tree) is int:
        return tree
    if type(tree) is float:
        return tree if math.isfinite(tree) else {"float": repr(tree)}
    if isinstance(tree, Tensor | numpy.ndarray):
        return _store(tree, prefix, tensors)
    if isinstance(tree, numpy.generic):
        return _encode(tree.item(), prefix, tensors, place=place, depth=depth + 1)

    def inside(value: Tree, key: object) -> Json:
        return _encode(value, prefix, tensors, place=f"{place}[{key!r}]", depth=depth + 1)

    if isinstance(tree, Mapping):  # MultiStepLR counts its milestones in a Counter
        return {
            "counter" if isinstance(tree, Counter) else "dict": [
                [inside(key, key), inside(value, key)] for key, value in tree.items()
            ]
        }
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [inside(value, number) for number, value in enumerate(tree)]}
    raise ConfigError(
        f"{place} is a {type(tree).__name__}: only numbers, strings, tensors, lists, tuples and dicts can be "
        "stored without pickle; give the optimizer or scheduler plain values"
    )


def _store(value: Tensor | numpy.ndarray[Any, Any], prefix: str, tensors: dict[str, Tensor]) -> Json:
    name = f"{prefix}/{len(tensors)}"
    if isinstance(value, Tensor):
        held = value.detach()
        on_processor = held.device.type == "cpu" and held.dtype == torch.float32
        tensors[name] = _like(held).copy_(held) if on_processor else held.to("cpu", copy=True).contiguous()
        return {"tensor": name}
    tensors[name] = torch.from_numpy(value.copy())
    return {"array": name}


def _like(tensor: Tensor) -> Tensor:
    """Memory of numpy's, which asks for huge pages: a quarter of the time that torch's takes to be written first."""
    return torch.from_numpy(numpy.empty(tuple(tensor.shape), dtype=numpy.float32))


def _decode(document: Json, tensors: Mapping[str, Tensor]) -> Tree:
    if not isinstance(document, dict):
        return document
    ((kind, inner),) = document.items()
    match kind:
        case "float":
            return float(inner)
        case "tensor":
            return tensors[inner].clone()  # the optimizer will write into it
        case "array":
            return tensors[inner].numpy().copy()
        case "dict":
            return {_decode(key, tensors): _decode(value, tensors) for key, value in inner}
        case "counter":
            return Counter({_decode(key, tensors): _decode(value, tensors) for key, value in inner})
        case "list":
            return [_decode(value, tensors) for value in inner]
        case "tuple":
            return tuple(_decode(value, tensors) for value in inner)
    raise ValueError(f"unknown tag {kind!r}")
