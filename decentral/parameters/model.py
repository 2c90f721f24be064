"""The schema of a model: its parameters by fragments, its buffers, and what of it is not trained.

Fragments are strided over the transformer blocks (block b -> fragment b mod P-1, the rest in the last one), as in
Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, arXiv:2501.18512.
"""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.parameters.schema import (
    FROZEN_DIGEST_NBYTES,
    MAX_FRAGMENTS,
    BufferSpec,
    Fragment,
    FrozenSpec,
    ParameterSpec,
    Schema,
)
from decentral.parameters.sharding import whole_of

NamedParameters = torch.nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

_WRAPPERS = (
    "_orig_mod",
    "_checkpoint_wrapped_module",
)  # of torch.compile, of activation checkpointing: in every name below


def schema_of(model_or_named_parameters: NamedParameters, num_fragments: int = 1) -> Schema:
    """The schema of a model, in ``named_parameters`` and ``named_buffers`` order; hashes what is frozen.

    With P > 1 fragments, the block numbered b (first integer component of the dotted name) goes to fragment
    b mod (P-1) and everything else (embeddings, head, norms) to the last one; with nothing else, b mod P.
    Raises ConfigError for a model that cannot be trained together.
    """
    source = model_or_named_parameters
    parameters = parameters_of(source)
    buffers = buffers_of(source) if isinstance(source, torch.nn.Module) else {}
    _refuse_complex({**parameters, **buffers})
    specs = [ParameterSpec(name, tuple(p.shape)) for name, p in parameters.items() if p.requires_grad]
    if not specs:
        raise ConfigError("no parameter of the model requires gradients, so there is nothing to train; unfreeze some")
    if not 1 <= num_fragments <= MAX_FRAGMENTS:
        raise ConfigError(f"schema_of(num_fragments={num_fragments}): want 1 to {MAX_FRAGMENTS}")
    members = _strided(specs, num_fragments)
    if not all(members):
        raise ConfigError(
            f"schema_of(num_fragments={num_fragments}): fragment {members.index([])} would be empty, the model has "
            f"{len({_block(s.name) for s in specs} - {None})} blocks; use fewer fragments"
        )
    return Schema(
        tuple(Fragment(index, tuple(group)) for index, group in enumerate(members)),
        tuple(_buffer(name, buffer) for name, buffer in buffers.items()),
        tuple(_frozen(name, p) for name, p in parameters.items() if not p.requires_grad),
    )


def parameters_of(source: NamedParameters) -> dict[str, Tensor]:
    """Every parameter once, trained or not, by its name in the run: compiled or sharded, a model is the same one."""
    if isinstance(source, torch.nn.Module):
        source = source.named_parameters()
    return {_plain(name): p for name, p in (source.items() if isinstance(source, Mapping) else source)}


def buffers_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """The buffers that the model's ``state_dict`` holds, by their names in the run, as they are now."""
    kept = model.state_dict().keys()
    return {_plain(name): buffer for name, buffer in model.named_buffers() if name in kept}


def frozen_digest(parameter: Tensor) -> str:
    """The blake2b-128 of a tensor's bytes, row-major, in hex; of a sharded one every process has to ask."""
    flat = whole_of(parameter).cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=FROZEN_DIGEST_NBYTES).hexdigest()


def _plain(name: str) -> str:
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def _buffer(name: str, buffer: Tensor) -> BufferSpec:
    return BufferSpec(name, tuple(buffer.shape), "float" if buffer.is_floating_point() else "integer")


def _frozen(name: str, parameter: Tensor) -> FrozenSpec:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return FrozenSpec(name, tuple(parameter.shape), dtype, frozen_digest(parameter))


def _refuse_complex(tensors: Mapping[str, Tensor]) -> None:
    found = next((name for name, tensor in tensors.items() if tensor.is_complex()), None)
    if found is not None:
        raise ConfigError(
            f"schema_of: {found} is {tensors[found].dtype}, and what peers exchange is real: its imaginary part "
            "would be lost; hold real and imaginary part as two tensors (torch.view_as_real)"
        )


def _block(name: str) -> int | None:
    return next((int(word) for word in name.split(".") if word.isascii() and word.isdigit()), None)


def _strided(specs: list[ParameterSpec], num_fragments: int) -> list[list[ParameterSpec]]:
    if num_fragments == 1:
        return [specs]
    stride = num_fragments if all(_block(spec.name) is not None for spec in specs) else num_fragments - 1
    members: list[list[ParameterSpec]] = [[] for _ in range(num_fragments)]
    for spec in specs:
        block = _block(spec.name)
        members[-1 if block is None else block % stride].append(spec)
    return members
