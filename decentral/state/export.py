"""A checkpoint turned into a model folder: ``model.safetensors``, and ``config.json`` where the task gave one.

It holds the whole model under the names of its ``state_dict``, tied weights once: what is trained, what is frozen (from
``frozen.safetensors`` beside the checkpoints), and the buffers. What is trained is the anchor, the parameters all peers
share after the last commit: it evaluates better than any single peer's live copy (Streaming DiLoCo, arXiv:2501.18512,
2.67 against 2.77 at 500M). With a causal-lm task the folder opens with ``AutoModelForCausalLM.from_pretrained``. The
checkpoint's meta must hold ``parameters`` (``Schema.to_json()``); ``model`` = {"task": "causal-lm", "config": {...}}
adds the config, ``buffers`` = "own" says that each peer keeps its own.

Of adapters of peft on a frozen base the folder holds them alone, as ``PeftModel.from_pretrained`` opens them.

For the way to another machine ``model.safetensors.packed`` takes the tensors' place; ``unpack`` makes the folder of it.
"""

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from decentral.errors import ConfigError, DiskError, PayloadError, UsageError
from decentral.parameters import Schema, in_dtype_of, split
from decentral.state.checkpoint import (
    ADAPTER,
    ADAPTER_CONFIG,
    ADAPTER_TASK,
    Checkpoint,
    load_newest,
    name_in_adapter_file,
    newest_nbytes,
    read_frozen,
)
from decentral.state.durable import DISK, TEMPORARY, Disk, disk_errors, make_private_folders
from decentral.state.snapshot import (
    BUFFERS,
    BY_PLANES,
    CHUNK_NBYTES,
    FORM_NBYTES,
    anchor_name,
    from_form,
    live_buffer_name,
    to_form,
)
from decentral.state.tensor_file import OnBytes, untold, write_tensor_file

# ---- the model folder ----

Beside = Callable[[Mapping[str, Any]], Mapping[str, str]]  # texts beside a config, by file name
OnShare = Callable[[float], None]  # is told which share of the work is done, from 0 to 1
MODEL, PACKED, CONFIG = "model.safetensors", "model.safetensors.packed", "config.json"

_WRITING, _PACKING = 5, 3  # times as long as reading, a byte: 117, 176 and 583 MB/s on one machine
_UNPACKED = 1.2  # times the bytes of the packed file: float32 is packed in five sixths
_OF_A_CHECKPOINT = 0.25  # that a model takes: beside it stand the live copy and two moments


def untold_share(share: float) -> None:
    """Nobody wants to know."""


class _Work:
    """How far an export is, by the bytes that are read, written and packed; of the model's size a guess at first."""

    def __init__(self, checkpoint_nbytes: int, packed: bool, on_share: OnShare) -> None:
        self._read, self._per_byte, self._on_share = checkpoint_nbytes, _WRITING + _PACKING * packed, on_share
        self._done = 0.0
        self.is_of(_OF_A_CHECKPOINT * checkpoint_nbytes)

    def is_of(self, model_nbytes: float) -> None:
        self._total = max(1.0, self._read + self._per_byte * model_nbytes)

    def read(self, nbytes: int) -> None:
        self._did(nbytes)

    def wrote(self, nbytes: int) -> None:
        self._did(_WRITING * nbytes)

    def note_packing(self, nbytes: int) -> None:
        self._did(_PACKING * nbytes)

    def _did(self, cost: float) -> None:
        self._done += cost
        self._on_share(min(1.0, self._done / self._total))


def export(
    checkpoints: Path,
    to: Path,
    beside: Beside | None = None,
    *,
    packed: bool = False,
    on_share: OnShare = untold_share,
) -> Checkpoint:
    """Write the newest valid checkpoint's anchor as a model folder ``to``, packed or not; returns the checkpoint used.

    ``beside`` names texts to write beside a causal-lm's ``config.json``, such as its tokenizer.

    Raises:
        UsageError: ``to`` exists already and is not an empty folder.
        DiskError: no valid checkpoint, or ``to`` cannot be written; no partial folder stays.
        ConfigError: the checkpoint holds no anchor of a model.

    A DiskError also says that the model has frozen parameters and their file is missing.

    """
    _check_free(to)
    work = _Work(newest_nbytes(checkpoints), packed, on_share)
    checkpoint = load_newest(checkpoints, work.read)
    if checkpoint is None:
        raise DiskError(f"no checkpoint in {checkpoints}; train until one is written, or check the folder")
    if (adapters := _adapters_of(checkpoint)) is not None:
        _export_adapters(checkpoint, adapters, to, packed)
        return checkpoint
    model = whole_model(checkpoint, checkpoints.parent)
    work.is_of(sum(tensor.numel() * tensor.element_size() for tensor in model.values()))
    with disk_errors(f"writing the model to {to}"), _new_folder(to) as temporary:
        _write_model(temporary, model, packed, work)
        if (config := config_of(checkpoint)) is not None:
            _write_config(temporary, config, {} if beside is None else beside(config))
    return checkpoint


def unpack(folder: Path, to: Path, on_share: OnShare = untold_share) -> None:
    """Write the model folder that ``folder``, a packed one, was made of. Raises UsageError or DiskError."""
    _check_free(to)
    with disk_errors(f"writing the model to {to}"), _new_folder(to) as temporary:
        work = _Work(0, False, on_share)
        work.is_of((folder / PACKED).stat().st_size * _UNPACKED)
        unpack_file(folder / PACKED, temporary / MODEL, on_bytes=work.wrote)
        for path in folder.glob("*.json"):  # its configuration and tokenizer
            DISK.write(temporary / path.name, [path.read_bytes()])


def is_of_adapters(checkpoint: Checkpoint) -> bool:
    """Tell whether adapters of peft were trained, whose base is elsewhere."""
    return _adapters_of(checkpoint) is not None


def _adapters_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    model = checkpoint.meta.get("model") or {}
    return model if model.get("task") == ADAPTER_TASK else None


def _export_adapters(checkpoint: Checkpoint, described: Mapping[str, Any], to: Path, packed: bool) -> None:
    """The folder that peft's ``save_pretrained`` would have written, of the anchor."""
    if packed:
        raise UsageError("--packed: the run trained adapters, which are small; export them as they are")
    trained = anchor_parameters(checkpoint)
    named = {name_in_adapter_file(name, described["adapter"]) or name: tensor for name, tensor in trained.items()}
    document = json.dumps(described["config"], indent=2, sort_keys=True) + "\n"
    with disk_errors(f"writing the adapters to {to}"), _new_folder(to) as temporary:
        write_tensor_file(temporary / ADAPTER, named, {"format": "pt"})
        DISK.write(temporary / ADAPTER_CONFIG, [document.encode()])


def config_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The transformers configuration of the checkpoint's model; None for any other model."""
    model = checkpoint.meta.get("model") or {}
    return dict(model["config"]) if model.get("task") == "causal-lm" else None


def whole_model(checkpoint: Checkpoint, folder: Path) -> dict[str, Tensor]:
    """Trained parameters, float32; frozen ones of the run directory ``folder``, and buffers, in their own dtypes."""
    parameters = anchor_parameters(checkpoint)
    schema = Schema.from_json(checkpoint.meta["parameters"])
    frozen = read_frozen(folder, schema.frozen) if schema.frozen else {}
    return parameters | frozen | _buffers(checkpoint, schema)


def _buffers(checkpoint: Checkpoint, schema: Schema) -> dict[str, Tensor]:
    """Take what the peers share of them; where each keeps its own, or it became something else, this peer's."""
    names = {spec.name: live_buffer_name(spec.name) for spec in schema.buffers}
    live = {name: checkpoint.tensors[kept] for name, kept in names.items() if kept in checkpoint.tensors}
    if not live or checkpoint.meta.get("buffers") == "own":
        return live
    pieces = split(checkpoint.tensors[BUFFERS], [spec.shape for spec in schema.buffers])
    shared = {s.name: p for s, p in zip(schema.buffers, pieces, strict=True) if s.has_mean and s.name in live}
    fits = {name: piece for name, piece in shared.items() if live[name].shape == piece.shape}
    return live | {name: in_dtype_of(live[name], piece) for name, piece in fits.items()}


def anchor_parameters(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Named parameters of the anchor in the model's shapes, float32."""
    try:
        schema = Schema.from_json(checkpoint.meta["parameters"])
        flats = {f.index: checkpoint.tensors[anchor_name(f.index)] for f in schema.fragments}
    except (KeyError, TypeError, ConfigError, PayloadError) as error:
        raise ConfigError(f"{checkpoint.path} holds no anchor of a run ({error}); name another folder") from error
    parameters: dict[str, Tensor] = {}
    for fragment in schema.fragments:
        names = (parameter.name for parameter in fragment.parameters)
        parameters |= dict(zip(names, split(flats[fragment.index], fragment), strict=True))
    return parameters


def _check_free(to: Path) -> None:
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UsageError(f"{to} exists and is not an empty folder; name another with --to")


def _write_model(folder: Path, parameters: dict[str, Tensor], packed: bool, work: _Work) -> None:
    write_tensor_file(folder / MODEL, parameters, {"format": "pt"}, on_bytes=work.wrote)
    if packed:
        pack_file(folder / MODEL, folder / PACKED, on_bytes=work.note_packing)
        DISK.remove(folder / MODEL)


def _write_config(folder: Path, config: Mapping[str, Any], beside: Mapping[str, str]) -> None:
    document = json.dumps(config, indent=2, sort_keys=True) + "\n"
    for name, text in {CONFIG: document, **beside}.items():
        DISK.write(folder / name, [text.encode()])


@contextlib.contextmanager
def _new_folder(to: Path) -> Iterator[Path]:
    """A folder under another name until all of it is durable, and gone when that fails."""
    make_private_folders(to.parent)
    temporary = to.with_name(f"{TEMPORARY}{to.name}-{os.getpid()}")  # two exports must not share it
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        DISK.make_folder(temporary)
        yield temporary
        DISK.sync_folder(temporary)
        with contextlib.suppress(FileNotFoundError):
            to.rmdir()  # an empty folder, checked above
        DISK.rename(temporary, to)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    DISK.sync_folder(to.parent)


# ---- a file packed for the way ----
#
# It takes five sixths of a safetensors file of float32, and unpacks to the very same file.
#
# Layout, little-endian: magic "DCPK", bytes of the file u64; then for each 256 KiB of it a length u32 and the chunk in
# a form (see `to_form`); then the blake2b-256 of the file. A stranger may have made it: no chunk is expanded beyond its
# size, and memory stays at one.

_PACKED_HEAD = struct.Struct("<4sQ")
_MAGIC = b"DCPK"
_LENGTH = struct.Struct("<I")
_HASH_NBYTES = 32


def pack_file(plain: Path, packed: Path, disk: Disk = DISK, on_bytes: OnBytes = untold) -> None:
    """Write ``packed``, a new file; ``on_bytes`` is told how many more of ``plain`` are in it. Raises OSError."""
    with plain.open("rb") as file:
        disk.write(packed, _telling_of_plain(_pack(file, nbytes := plain.stat().st_size), nbytes, on_bytes))


def unpack_file(packed: Path, plain: Path, disk: Disk = DISK, on_bytes: OnBytes = untold) -> None:
    """Write ``plain``, a new file, as it was; none stays when DiskError is raised.

    ``on_bytes`` is told how many more are written.
    """
    with disk_errors(f"unpacking {packed} to {plain}"):
        try:
            with packed.open("rb") as file:
                disk.write(plain, _telling(_unpack(file), on_bytes))
        except PayloadError as error:
            disk.remove(plain)
            why = str(error).split(";")[0]  # its way out is for peers
            raise DiskError(f"{packed} is damaged ({why}); copy it again") from None
        except BaseException:
            disk.remove(plain)
            raise


def _telling(parts: Iterator[bytes], on_bytes: OnBytes) -> Iterator[bytes]:
    for part in parts:
        yield part
        on_bytes(len(part))


def _telling_of_plain(parts: Iterator[bytes], nbytes: int, on_bytes: OnBytes) -> Iterator[bytes]:
    """``parts``: a head, then one for each chunk of a file of ``nbytes``, then a seal."""
    yield next(parts)
    for size, part in zip(_chunk_sizes(nbytes), parts, strict=False):
        yield part
        on_bytes(size)
    yield from parts


def _pack(file: BinaryIO, nbytes: int) -> Iterator[bytes]:
    seal = blake2b(digest_size=_HASH_NBYTES)
    yield _PACKED_HEAD.pack(_MAGIC, nbytes)
    for size in _chunk_sizes(nbytes):
        chunk = _read_exactly(file, size)
        seal.update(chunk)
        form = to_form(chunk, BY_PLANES if size % 4 == 0 else 0)
        yield _LENGTH.pack(len(form)) + form
    yield seal.digest()


def _unpack(file: BinaryIO) -> Iterator[bytes]:
    magic, nbytes = _PACKED_HEAD.unpack(_read_exactly(file, _PACKED_HEAD.size))
    if magic != _MAGIC:
        raise PayloadError("it does not begin as a packed file")
    seal = blake2b(digest_size=_HASH_NBYTES)
    for size in _chunk_sizes(nbytes):
        (length,) = _LENGTH.unpack(_read_exactly(file, _LENGTH.size))
        if length > size + FORM_NBYTES:
            raise PayloadError(f"a chunk of {size} bytes has {length}")
        chunk = from_form(_read_exactly(file, length), size)
        seal.update(chunk)
        yield chunk
    if _read_exactly(file, _HASH_NBYTES) != seal.digest() or file.read(1):
        raise PayloadError("its hash is another, or something follows it")


def _chunk_sizes(nbytes: int) -> Iterator[int]:
    for begin in range(0, nbytes, CHUNK_NBYTES):
        yield min(CHUNK_NBYTES, nbytes - begin)


def _read_exactly(file: BinaryIO, nbytes: int) -> bytes:
    data = file.read(nbytes)
    if len(data) != nbytes:
        raise PayloadError("it is cut short")
    return data
