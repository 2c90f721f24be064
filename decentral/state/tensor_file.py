"""Named tensors in one safetensors file, with a hash for the header and one for each tensor.

The library's own ``save_file`` never calls fsync and hides the error number, so writing is done here (eight
bytes of length, a JSON header, then the tensors); reading stays the library's, which checks header, offsets
and sizes.

Format: safetensors 0.x, https://huggingface.co/docs/safetensors
"""

import json
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from decentral.errors import ConfigError
from decentral.state.durable import DISK, Disk

HASH_NBYTES = 32
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip

OnBytes = Callable[[int], None]  # is told how many more bytes of tensors were read or written


def untold(nbytes: int) -> None:
    """Nobody wants to know."""


class DamagedFile(Exception):
    """The file is not what was written. Callers pass over it and say why; never leaves ``state``."""


Whole = Callable[[str, Tensor], Tensor]  # by name


def as_it_is(name: str, tensor: Tensor) -> Tensor:
    """A tensor of which all is here."""
    return tensor


def write_tensor_file(
    path: Path,
    tensors: Mapping[str, Tensor],
    format_note: Mapping[str, str],
    disk: Disk = DISK,
    whole: Whole = as_it_is,
    *,
    on_bytes: OnBytes = untold,
) -> dict[str, str]:
    """Write and fsync a new safetensors file; returns the hashes of ``""`` (the header) and each tensor.

    Tensors are read one after the other, on any device; one at a time is copied if it is not contiguous CPU
    memory. ``whole`` gets one together of which only a part is here; dtype and shape are right before.

    Raises:
        OSError: the disk refused.
        ConfigError: a dtype that safetensors does not know.

    """
    header = _header(tensors, format_note)
    hashes = {"": blake2b(header, digest_size=HASH_NBYTES).hexdigest()}

    def parts() -> Iterator[bytes | memoryview]:
        yield header
        for name, tensor in tensors.items():
            data = tensor_bytes(whole(name, tensor))
            hashes[name] = blake2b(data, digest_size=HASH_NBYTES).hexdigest()
            yield data
            on_bytes(len(data))

    disk.write(path, parts())
    return hashes


def read_tensor_file(path: Path, hashes: Mapping[str, str], on_bytes: OnBytes = untold) -> dict[str, Tensor]:
    """Read what ``write_tensor_file`` wrote, every byte checked. Raises DamagedFile with the reason."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise DamagedFile(f"{path.name}: the header says {size} bytes, the file is shorter")
            file.seek(0)
            header = file.read(8 + size)
        if blake2b(header, digest_size=HASH_NBYTES).hexdigest() != hashes.get(""):
            raise DamagedFile(f"{path.name}: the header is not what was written")
        # Clones: the library maps the file, and one that shrinks while mapped kills us with SIGBUS.
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedFile(f"{path.name}: {error}") from error
    if set(tensors) != set(hashes) - {""}:
        raise DamagedFile(f"{path.name}: it names other tensors than were written")
    for name, tensor in tensors.items():
        data = tensor_bytes(tensor)
        if blake2b(data, digest_size=HASH_NBYTES).hexdigest() != hashes[name]:
            raise DamagedFile(f"{path.name}: tensor {name} is not what was written")
        on_bytes(len(data))
    return {name: tensors[name] for name in hashes if name}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes, row-major; a view of its own memory where that is contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _header(tensors: Mapping[str, Tensor], format_note: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(format_note)} if format_note else {}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ConfigError(f"tensor {name}: safetensors cannot hold {tensor.dtype}; convert it first")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    return len(text).to_bytes(8, "little") + text
