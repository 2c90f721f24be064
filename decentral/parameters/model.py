"""A model's schema, and the way of its parameters and buffers out of it and into it, as flat vectors and digests.

Fragments are strided over the transformer blocks (block b -> fragment b mod P-1, the rest in the last one), as in
Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, arXiv:2501.18512; or they are stages, one
after the other, which a peer can train without the rest.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Literal

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from decentral.errors import ConfigError, ManifestMismatch
from decentral.parameters.schema import (
    FROZEN_DIGEST_NBYTES,
    MAX_DIMENSIONS,
    MAX_FRAGMENTS,
    MAX_NAME_CHARS,
    MAX_PARAMETERS,
    BufferSpec,
    Fragment,
    FrozenSpec,
    ParameterSpec,
    Schema,
    is_sharded,
    whole_of,
)
from decentral.tensors.device import PROCESSOR, to_device
from decentral.tensors.memory import fresh
from decentral.tensors.ops import is_finite

# ---- the schema of a model ----

NamedParameters = torch.nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Layout = Literal["strided", "stages"]

# of torch.compile, of activation checkpointing: in the name of everything inside
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_REPLICATING = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)  # what is inside is their `module`


def schema_of(
    model_or_named_parameters: NamedParameters,
    num_fragments: int = 1,
    moved: Collection[str] = (),
    layout: Layout = "strided",
) -> Schema:
    """The schema of a model, in ``named_parameters`` and ``named_buffers`` order; hashes what is frozen.

    ``moved``: parameters that stand ahead of the buffers, as what they are: no gradient trains them, and they change.
    Strided, with P > 1 fragments, the block numbered b (first integer component of the dotted name) goes to fragment
    b mod (P-1) and everything else (embeddings, head, norms) to the last one; with nothing else, b mod P. In stages,
    blocks and what stands between them keep their order, and the largest stage is as small as it can be.
    Raises ConfigError for a model that cannot be trained together.
    """
    source = model_or_named_parameters
    parameters = parameters_of(source)
    _refuse_without_values(parameters)
    buffers = buffers_of(source) if isinstance(source, torch.nn.Module) else {}
    _refuse_without_values(buffers)
    _refuse_complex(parameters, "hold real and imaginary part as two tensors (torch.view_as_real)")
    _refuse_complex(buffers, f"hold both parts as one tensor (torch.view_as_real), or {_MADE_ANEW}")
    _refuse_sparse(parameters, "hold its values as a parameter and its indices as a buffer")
    _refuse_sparse(buffers, f"hold indices and values as two buffers, or {_MADE_ANEW}")
    _refuse_unheard({**parameters, **buffers})
    buffers = {name: p for name, p in parameters.items() if name in moved} | buffers
    parameters = {name: p for name, p in parameters.items() if name not in moved}
    frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
    specs = [ParameterSpec(name, tuple(p.shape)) for name, p in parameters.items() if p.requires_grad]
    if not specs:
        raise ConfigError("no parameter of the model requires gradients, so there is nothing to train; unfreeze some")
    if not 1 <= num_fragments <= MAX_FRAGMENTS:
        raise ConfigError(f"schema_of(num_fragments={num_fragments}): want 1 to {MAX_FRAGMENTS}")
    members = _stride(specs, num_fragments) if layout == "strided" else _cut_into_stages(specs, num_fragments)
    if not all(members):
        raise ConfigError(
            f"schema_of(num_fragments={num_fragments}): fragment {members.index([])} would be empty, the model has "
            f"{len({_block(s.name) for s in specs} - {None})} blocks; use fewer fragments"
        )
    return Schema(
        tuple(Fragment(index, tuple(group)) for index, group in enumerate(members)),
        tuple(buffer_spec(name, buffer) for name, buffer in buffers.items()),
        tuple(_frozen_spec(name, part) for name, part in parts_of(frozen).items()),
    )


def parameters_of(source: NamedParameters) -> dict[str, Tensor]:
    """Every parameter once, trained or not, by its name in the run: compiled, sharded or replicated, a model is the
    same one.
    """
    if isinstance(source, torch.nn.Module):
        return _plainly(source, dict(source.named_parameters()))
    return {_plain(name): p for name, p in (source.items() if isinstance(source, Mapping) else source)}


def buffers_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """The buffers that the model's ``state_dict`` holds, by their names in the run, as they are now."""
    kept = model.state_dict().keys()
    return _plainly(model, {name: buffer for name, buffer in model.named_buffers() if name in kept})


def parts_of(frozen: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The plain tensors that frozen parameters consist of: themselves, or of one that is quantised (a subclass that
    torch can take apart, as torchao's) what is inside, each by its parameter's name and its own.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in frozen.items():
        if is_sharded(tensor) or not is_traceable_wrapper_subclass(tensor):
            found[name] = tensor
        else:
            inside, _ = tensor.__tensor_flatten__()
            found |= parts_of({f"{name}.{one}": getattr(tensor, one) for one in inside})
    return found


def put_buffer(model: torch.nn.Module, name: str, buffer: Tensor) -> None:
    """Have the module whose buffer has that name in the run hold ``buffer`` in its place, of whatever shape."""
    for prefix, module in model.named_modules():
        for leaf in module._buffers:
            if _plain(f"{prefix}.{leaf}" if prefix else leaf) == name:
                module._buffers[leaf] = buffer
                return


def parameters_named(names: Iterable[str], model: torch.nn.Module) -> frozenset[str]:
    """The parameters that ``names`` say, each one's name or that of a module around it. ConfigError for an unknown."""
    known, found = parameters_of(model), set[str]()
    for name in names:
        inside = {one for one in known if one == name or one.startswith(f"{name}.")}
        if not inside:
            tops = ", ".join(dict.fromkeys(one.partition(".")[0] for one in known))
            raise ConfigError(
                f"join(moved=[{name!r}]): no parameter of the model has this name, or is in a module of this name; "
                f"its names, as in named_parameters(), begin with {tops}"
            )
        found |= inside
    return frozenset(found)


_Inside = tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes of a module's parameters


def copy_tensors(model: torch.nn.Module, trained: Collection[int]) -> dict[str, tuple[str, ...]]:
    """Modules in which nothing is trained and that are, bit for bit, one that is: with the names of their parameters.

    ``trained``: ids of parameters. A teacher, an average or a target network begins like that, and hardly anything
    else does: blocks of one stack are left out, some of which may be frozen, and so is what is constant everywhere.
    """
    named = parameters_of(model)
    _refuse_without_values(named)
    names = {id(parameter): name for name, parameter in named.items()}
    found: dict[str, tuple[str, ...]] = {}
    originals: dict[_Inside, list[tuple[str, list[Tensor]]]] = {}
    kept: list[tuple[str, _Inside, list[Tensor]]] = []
    for path, module in model.named_modules():
        inside = dict(module.named_parameters())
        held, layout = list(inside.values()), tuple((name, tuple(p.shape)) for name, p in inside.items())
        count = sum(id(parameter) in trained for parameter in held)
        if held and count == len(held):
            originals.setdefault(layout, []).append((path, held))
        elif held and not count:
            kept.append((path, layout, held))
    for path, shapes, held in kept:
        is_within = any(path.startswith(f"{one}.") for one in found)
        of = [params for original, params in originals.get(shapes, ()) if not _of_one_stack(path, original)]
        if not is_within and any(_alike(held, params) for params in of):
            found[_plain(path)] = tuple(names[id(parameter)] for parameter in held)
    return found


def _of_one_stack(path: str, other: str) -> bool:
    apart = [(a, b) for a, b in zip(path.split("."), other.split("."), strict=False) if a != b]
    return path.count(".") == other.count(".") and len(apart) == 1 and all(word.isdigit() for word in apart[0])


def _alike(held: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    if any(a.device != b.device or a.dtype != b.dtype for a, b in zip(held, others, strict=True)):
        return False
    tells = any(one.numel() > 1 and bool((one != one.reshape(-1)[0]).any()) for one in held)
    return tells and all(torch.equal(a, b) for a, b in zip(held, others, strict=True))


def frozen_digest(parameter: Tensor) -> str:
    """The blake2b-128 of a tensor's bytes, row-major, in hex; of a sharded one every process has to ask."""
    flat = whole_of(parameter).cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=FROZEN_DIGEST_NBYTES).hexdigest()


def _plainly(model: torch.nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By their names in the run. A module of the user's own may be called ``module``, too."""
    replicas = dict(model.named_modules()) if any("module." in name for name in named) else {}
    prefixes = [name for name, module in replicas.items() if isinstance(module, _REPLICATING)]
    for prefix in sorted(prefixes, key=len, reverse=True):  # the innermost first: what is outside keeps its name
        before, after = (f"{prefix}.module.", f"{prefix}.") if prefix else ("module.", "")
        named = {after + name[len(before) :] if name.startswith(before) else name: p for name, p in named.items()}
    return {_plain(name): p for name, p in named.items()}


def _plain(name: str) -> str:
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return ".".join(word for word in name.split(".") if word not in _WRAPPERS)


def buffer_spec(name: str, buffer: Tensor) -> BufferSpec:
    """As a schema has it."""
    return BufferSpec(name, tuple(buffer.shape), "float" if buffer.is_floating_point() else "integer")


def _frozen_spec(name: str, parameter: Tensor) -> FrozenSpec:
    dtype = str(parameter.dtype).removeprefix("torch.")
    try:
        return FrozenSpec(name, tuple(parameter.shape), dtype, frozen_digest(parameter))
    except (RuntimeError, TypeError, AttributeError) as error:  # as whatever package made it says it
        kind = type(parameter).__name__
        raise ConfigError(
            f"{name} is frozen, and its bytes cannot be read ({kind} of {dtype}: {str(error).splitlines()[0][:120]}): "
            "nobody could tell whether all peers have the same; hold it in a plain tensor"
        ) from error


def _refuse_without_values(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise ConfigError(
                f"{name} has no shape yet: its module is lazy, and takes it from the first batch; run one batch "
                "through the model before the optimizer is made, then join"
            )
        if tensor.is_meta:
            raise ConfigError(
                f"{name} is on the meta device, where tensors have no values; load the weights first (or call "
                "model.to_empty(device=...) and initialise them), and let nothing offload them between steps"
            )
        if hasattr(tensor, "ds_shape"):
            raise ConfigError(
                f"{name} is taken apart by DeepSpeed's ZeRO 3, and holds nothing between steps; "
                "shard the model with fully_shard (accelerate: fsdp_version: 2) in its place"
            )


_MADE_ANEW = "where the script makes it anew at each start, as a table, register it with persistent=False"


def _refuse_complex(tensors: Mapping[str, Tensor], way_out: str) -> None:
    found = next((name for name, tensor in tensors.items() if tensor.is_complex()), None)
    if found is not None:
        raise ConfigError(
            f"schema_of: {found} is {tensors[found].dtype}, and what peers exchange is real: its imaginary part "
            f"would be lost; {way_out}"
        )


def _refuse_sparse(tensors: Mapping[str, Tensor], way_out: str) -> None:
    found = next((name for name, tensor in tensors.items() if tensor.layout in _SPARSE), None)
    if found is not None:
        raise ConfigError(f"schema_of: {found} is {tensors[found].layout}, and what peers exchange is dense; {way_out}")


def _refuse_unheard(tensors: Mapping[str, Tensor]) -> None:
    """Tell the founder of what a newcomer would refuse to read: it would wait for company for ever."""
    if len(tensors) > MAX_PARAMETERS:
        raise ConfigError(f"schema_of: {len(tensors)} tensors, and peers read {MAX_PARAMETERS}; stack those of a kind")
    for name, tensor in tensors.items():
        if len(name) > MAX_NAME_CHARS or tensor.ndim > MAX_DIMENSIONS:
            raise ConfigError(
                f"schema_of: {name[:80]} has {tensor.ndim} dimensions and a name of {len(name)} characters, and peers "
                f"read {MAX_DIMENSIONS} and {MAX_NAME_CHARS}; flatten it, or shorten its name"
            )


def _block(name: str) -> int | None:
    return next((int(word) for word in name.split(".") if word.isascii() and word.isdigit()), None)


def _stride(specs: list[ParameterSpec], num_fragments: int) -> list[list[ParameterSpec]]:
    if num_fragments == 1:
        return [specs]
    stride = num_fragments if all(_block(spec.name) is not None for spec in specs) else num_fragments - 1
    members: list[list[ParameterSpec]] = [[] for _ in range(num_fragments)]
    for spec in specs:
        block = _block(spec.name)
        members[-1 if block is None else block % stride].append(spec)
    return members


def _cut_into_stages(specs: list[ParameterSpec], num_stages: int) -> list[list[ParameterSpec]]:
    """Cut the blocks, and what stands between them, into neighbours; empty ones where there are too few.

    Bytes and work of a matrix are both as its elements are many, so these decide; of an embedding, which is looked up,
    its bytes alone: it costs no more time than that.
    """
    blocks = [list(same) for _, same in groupby(specs, key=lambda spec: _block(spec.name))]
    sizes = [sum(spec.numel for spec in block) for block in blocks]
    if len(blocks) < num_stages:
        return [*blocks, *([] for _ in range(num_stages - len(blocks)))]
    low, high = max(sizes), sum(sizes)  # of the largest stage
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_fill(sizes, middle, 1)) <= num_stages else (middle + 1, high)
    stages = [blocks[part] for part in _fill(sizes, low, num_stages)]
    return [[spec for block in stage for spec in block] for stage in stages]


def _fill(sizes: Sequence[int], most: int, num_stages: int) -> list[slice]:
    """Fill stages of at most so many elements one after the other, and leave one block at least for each to come."""
    found, begin, held = list[slice](), 0, 0
    for place, size in enumerate(sizes):
        is_last_chance = len(sizes) - place < num_stages - len(found)
        if place > begin and (held + size > most or is_last_chance):
            found.append(slice(begin, place))
            begin, held = place, 0
        held += size
    return [*found, slice(begin, len(sizes))]


# ---- fragments and buffers, flat ----

# Shape suffixes: N = elements of one fragment, B = elements of all buffers; flat float32, on the CPU unless it is said.

_MOST_WHOLE = 2.0**53  # whole numbers that a float64 holds one by one


def gather(parameters: Mapping[str, Tensor], fragment: Fragment, place: torch.device = PROCESSOR) -> Tensor:
    """Copy a fragment out of a model: flat float32 on ``place``, shape (fragment.numel,).

    Of a model on one CUDA device it is put together there, and crosses at once.
    """
    found = [_find(parameters, spec) for spec in fragment.parameters]
    flat_N = _empty(fragment.numel, _device_of(found))
    with torch.no_grad():  # all in one call: to tell torch of each takes longer than a small one's copy
        torch._foreach_copy_(split(flat_N, fragment), found)
    return to_device(flat_N, place)


def scatter(flat: Tensor, fragment: Fragment, parameters: Mapping[str, Tensor]) -> None:
    """Copy a flat fragment into a model in place, to each parameter's own device and dtype; no gradient."""
    targets = [_find(parameters, spec) for spec in fragment.parameters]  # all found before one is changed
    here = to_device(flat, _device_of(targets))
    with torch.no_grad():
        torch._foreach_copy_(targets, split(here, fragment))


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    """The CUDA device that has all of them; the processor where there is none."""
    devices = {one.device for one in tensors}
    return devices.pop() if len(devices) == 1 and all(one.type == "cuda" for one in devices) else PROCESSOR


def _empty(numel: int, device: torch.device) -> Tensor:
    return fresh(numel) if device == PROCESSOR else torch.empty(numel, dtype=torch.float32, device=device)


def gather_buffers(
    buffers: Mapping[str, Tensor], specs: Sequence[BufferSpec], otherwise_B: Tensor | None = None
) -> Tensor:
    """Copy the buffers out of a model, in the schema's order. Whole numbers are exact below 2**24.

    ``otherwise_B``: what stands for those that are not in ``buffers``; None: zeros.
    """
    numel = sum(spec.numel for spec in specs)
    flat_B = torch.zeros(numel, dtype=torch.float32, device="cpu") if otherwise_B is None else otherwise_B.clone()
    for spec, piece in zip(specs, split(flat_B, [spec.shape for spec in specs]), strict=True):
        if spec.name in buffers:
            piece.copy_(_find(buffers, spec).detach())
    return flat_B


def scatter_buffers(flat_B: Tensor, specs: Sequence[BufferSpec], buffers: Mapping[str, Tensor]) -> None:
    """Copy flat buffers into those ``buffers`` of a model that are given, in place, in their own device and dtype."""
    pieces = split(flat_B, [spec.shape for spec in specs])
    targets = [(_find(buffers, spec), piece) for spec, piece in zip(specs, pieces, strict=True) if spec.name in buffers]
    with torch.no_grad():
        for target, piece in targets:
            overwrite(target, in_dtype_of(target.detach().cpu(), piece))


def overwrite(buffer: Tensor, value: Tensor) -> None:
    """Copy ``value`` into a buffer in place. Of one that ``expand`` made, its memory is written once."""
    if buffer.layout == torch.strided and 0 in buffer.stride():
        once = tuple(slice(0, 1) if not stride else slice(None) for stride in buffer.stride())
        buffer, value = buffer[once], value[once]
    buffer.copy_(value)


def in_dtype_of(like: Tensor, value: Tensor) -> Tensor:
    """``value``, float32, in the dtype of ``like``, of the same shape: rounded and bounded for whole numbers.

    Where float32 cannot tell it from ``like``, ``like`` stays: a table of large whole numbers or of float64 that no
    step changes survives.
    """
    found = value
    if not like.is_floating_point():
        least, most = (0.0, 1.0) if like.dtype == torch.bool else _bounds(like.dtype)
        found = value.to(torch.float64).round().clamp(least, most)
    return torch.where(like.to(torch.float32) == value, like, found.to(like.dtype))


def _bounds(dtype: torch.dtype) -> tuple[float, float]:
    info = torch.iinfo(dtype)
    return max(float(info.min), -_MOST_WHOLE), min(float(info.max), _MOST_WHOLE)


def split(flat: Tensor, fragment_or_shapes: Fragment | Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of a flat tensor, shaped like the parameters; writing to them writes to ``flat``."""
    shapes = fragment_or_shapes.shapes if isinstance(fragment_or_shapes, Fragment) else fragment_or_shapes
    sizes = [math.prod(shape) for shape in shapes]
    if flat.shape != (sum(sizes),):
        raise ConfigError(f"split: a flat tensor of shape ({sum(sizes)},) is wanted, got {tuple(flat.shape)}")
    return [piece.view(shape) for piece, shape in zip(torch.split_with_sizes(flat, sizes), shapes, strict=True)]


def first_non_finite(flat: Tensor, specs: Fragment | Sequence[ParameterSpec]) -> str | None:
    """The name of the first of ``specs`` with NaN or Inf in ``flat``; None when all are finite."""
    if is_finite(flat):
        return None
    named = specs.parameters if isinstance(specs, Fragment) else specs
    parts = zip(named, split(flat, [spec.shape for spec in named]), strict=True)
    return next(spec.name for spec, part in parts if not bool(torch.isfinite(part).all()))


def digest(flat: Tensor) -> bytes:
    """32 bytes that name a tensor's exact bits: BLAKE3 over its little-endian float32 bytes.

    A tree over pieces of 1 KiB: they go through the lanes of vectors side by side, and through all threads that torch
    may use. 31.5 million values take 16 ms of one core, where blake2b takes 88.
    """
    array = flat.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False)
    return blake3(array.view(np.uint8).data, max_threads=torch.get_num_threads()).digest()


def combine_digests(digests: Sequence[bytes]) -> bytes:
    """The anchor's digest, 32 bytes, from its fragments' digests in order, and that of buffers where there are any."""
    if any(len(item) != 32 for item in digests):
        raise ConfigError(f"combine_digests: digests of 32 bytes are wanted, got {[len(item) for item in digests]}")
    return hashlib.blake2b(b"".join(digests), digest_size=32).digest()


def _find(tensors: Mapping[str, Tensor], spec: ParameterSpec) -> Tensor:
    found = tensors.get(spec.name)
    if found is None:
        raise ManifestMismatch(f"the model has no parameter {spec.name}; the run's schema wants {spec.shape}")
    if tuple(found.shape) != spec.shape:
        raise ManifestMismatch(f"{spec.name}: {tuple(found.shape)} here, {spec.shape} in the run; use the run's model")
    return found
