"""What of a model is not trained, in one file per run directory: written once, never sent, needed to export the model.

The run's schema has a digest of each tensor, so the file is checked by what all peers agreed on.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from decentral.errors import DiskError
from decentral.parameters import FrozenSpec, frozen_digest
from decentral.state.durable import DISK, TEMPORARY, Disk, disk_errors
from decentral.state.tensor_file import Whole, as_it_is, write_tensor_file

FROZEN = "frozen.safetensors"


def keep_frozen(
    folder: Path,
    specs: Sequence[FrozenSpec],
    tensors: Callable[[], Mapping[str, Tensor]],
    disk: Disk = DISK,
    whole: Whole = as_it_is,
) -> None:
    """Write ``FROZEN`` into ``folder``, durably, unless these very tensors are in it. DiskError: the disk refused.

    ``whole``: makes one tensor of what stands for it, when its turn comes.
    """
    path, digest = folder / FROZEN, _digest(specs)
    if _digest_in(path) == digest:
        return
    temporary = path.with_name(f"{TEMPORARY}{FROZEN}")
    with disk_errors(f"writing {path}"):
        disk.remove(temporary)
        write_tensor_file(temporary, tensors(), {"format": "pt", "digest": digest}, disk, whole)
        disk.rename(temporary, path)
        disk.sync_folder(folder)


def read_frozen(folder: Path, specs: Sequence[FrozenSpec]) -> dict[str, Tensor]:
    """The tensors that ``specs`` name, each checked. DiskError: the file is missing, of another model or damaged."""
    path = folder / FROZEN
    named = f"{len(specs)} frozen tensors of the model ({specs[0].name} ...)"
    way_out = "copy it from another peer of the run, or start this one again without it: it writes it"
    try:
        found = {name: tensor.clone() for name, tensor in load_file(path).items()}  # clones: see tensor_file
    except FileNotFoundError as error:
        raise DiskError(f"{path} is missing, and with it the {named}; {way_out}") from error
    except (OSError, SafetensorError) as error:
        raise DiskError(f"{path} cannot be read ({error}), and in it are the {named}; {way_out}") from error
    for spec in specs:
        if spec.name not in found or frozen_digest(found[spec.name]) != spec.digest:
            raise DiskError(f"{path}: {spec.name} is not the one that the run's peers agreed on; {way_out}")
    return {spec.name: found[spec.name] for spec in specs}


def _digest(specs: Sequence[FrozenSpec]) -> str:
    text = json.dumps([[spec.name, spec.shape, spec.dtype, spec.digest] for spec in specs])
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _digest_in(path: Path) -> str | None:
    """What a file that is there says of itself; its last rename came after its bytes were durable."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("digest")
    except (OSError, SafetensorError):
        return None
