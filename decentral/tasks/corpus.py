"""Text as one row of bytes, an order to walk such rows in, and a tokenizer for bytes.

The text is the standard library's own source, or what ``--data`` names. Nothing is downloaded here: every Python
carries about 12 MB of its own source, real text written by many hands. The last part of the row is held out for
evaluation; batches are drawn from the rest only.
"""

from __future__ import annotations

import json
import math
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decentral.errors import DataError
from decentral.manifest.terms import LEAST_TEXT_NBYTES, MOST_TEXT_NBYTES

STDLIB_MAX_NBYTES = 16 * 2**20  # enough for any demo; tests included, CPython 3.11 has 31 MB
STDLIB_WANTED_NBYTES = 8 * 10**6  # below this the test folders are read too
DATA_MAX_NBYTES = MOST_TEXT_NBYTES
MIN_NBYTES = LEAST_TEXT_NBYTES
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_CHUNK_NBYTES = 2**20
_BEGINNING_NBYTES = 8192  # text has no zero byte there, nearly all else has
FOREIGN_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Corpus:
    """Bytes to train on and bytes to evaluate on; both uint8, one-dimensional, never overlapping."""

    text: Tensor  # uint8 (N,), all of it
    cut: int  # where what is held out begins
    source: str  # for the screen: "the Python 3.11 standard library" or the path

    @property
    def train(self) -> Tensor:
        """Return the bytes to train on."""
        return self.text[: self.cut]

    @property
    def held_out(self) -> Tensor:
        """Return the bytes to evaluate on."""
        return self.text[self.cut :]

    @property
    def nbytes(self) -> int:
        """Return the bytes of both parts together."""
        return self.text.numel()


def load_corpus(data: Path | str | None = None, *, held_out: float = 0.05) -> Corpus:
    """Read the corpus; the same files give the same bytes on every machine.

    Args:
        data: a file, a folder (its text files by sorted relative path), or None for the standard library.
        held_out: fraction of the bytes, at the end, kept for evaluation; 0 < held_out <= 0.5.

    Raises:
        DataError: nothing there, unreadable, too small, or too large.

    """
    if not 0 < held_out <= 0.5:
        raise DataError(f"held_out={held_out}: must be in (0, 0.5], for example 0.05")
    text, source = _standard_library() if data is None else (bytearray(), f"--data {data}")
    if data is not None:
        for _, chunk in chunks(Path(data)):
            text += chunk
    check_size(len(text), source)
    row = torch.frombuffer(text, dtype=torch.uint8)
    return Corpus(row, row.numel() - int(row.numel() * held_out), source)


def check_size(nbytes: int, source: str, passed_over: str = "") -> None:
    """Raise DataError for too little to train on; ``passed_over`` is what was not read, and why."""
    if nbytes < MIN_NBYTES:
        raise DataError(
            f"{source} holds {nbytes} bytes of text{passed_over}, at least {MIN_NBYTES} are needed; "
            "name a larger file or folder with --data"
        )


def chunks(path: Path, on_foreign: Callable[[Path], None] = lambda file: None) -> Iterator[tuple[Path, bytes]]:
    """Yield what ``--data`` names, a MiB at a time in the order in which it is trained on, each with its file.

    Of a folder, files with a zero byte near their beginning are left out, each told to ``on_foreign``; a file that was
    named itself is taken as it is. Raises DataError.
    """
    try:
        files = _list_files(path) if path.is_dir() else [path]
        nbytes = sum(file.stat().st_size for file in files)
        if nbytes > DATA_MAX_NBYTES:
            raise DataError(f"--data {path} holds {nbytes} bytes, at most {DATA_MAX_NBYTES} fit; name a part")
        for file in files:
            if path.is_dir() and _is_foreign(file):
                on_foreign(file)
                continue
            for chunk in _chunks_of(file):
                yield file, chunk
    except OSError as error:
        raise DataError(f"--data {path} cannot be read ({error.strerror}); name one that this user can read") from error


def _is_foreign(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(_BEGINNING_NBYTES)


def _chunks_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_NBYTES):
            yield chunk


def _standard_library() -> tuple[bytearray, str]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _list_files(root) if file.suffix == ".py"]
    without_tests = [file for file in files if not TEST_FOLDERS & set(file.relative_to(root).parts[:-1])]
    nbytes = sum(file.stat().st_size for file in without_tests)
    chosen = without_tests if nbytes >= STDLIB_WANTED_NBYTES else files
    text = bytearray(b"".join(_read_until(STDLIB_MAX_NBYTES, chosen))[:STDLIB_MAX_NBYTES])
    if len(text) < MIN_NBYTES:  # a Python shipped as a zip or as byte code
        raise DataError(f"this Python keeps no source in {root}; name a text file or folder with --data")
    return text, f"the Python {sysconfig.get_python_version()} standard library"


def _list_files(root: Path) -> list[Path]:
    """Return the regular files below ``root`` by relative path; hidden ones, links and foreign packages left out."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in FOREIGN_FOLDERS and not name.startswith(".")]
        files = (Path(folder, name) for name in names if not name.startswith("."))
        found += [file for file in files if file.is_file() and not file.is_symlink()]
    return sorted(found, key=lambda file: file.relative_to(root).parts)


def _read_until(nbytes: int, files: Iterable[Path]) -> Iterator[bytes]:
    for file in files:
        if nbytes <= 0:
            return
        text = file.read_bytes()
        nbytes -= len(text)
        yield text


# ---- a shuffled order ----
#
# Of any length without a list of it: the same on every machine, whatever its version of torch.
#
# An index is written in two digits, one of which is moved by a hash of the other, six times in turn; a result beyond
# the length goes through again. Every index comes once, and no peer has to hold eight bytes for each.
#
# Source: Feistel networks as in Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.

_TURNS = 6
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Shuffle:
    """A permutation of ``range(length)`` that follows from ``seed``, any 64 bits."""

    length: int
    seed: int

    def __getitem__(self, place: int) -> int:
        """Return the index at ``place``, 0 <= place < length; about 5 microseconds."""
        high = math.isqrt(self.length - 1) + 1
        low = -(-self.length // high)
        while True:
            one, other = divmod(place, low)
            for round_ in range(0, _TURNS, 2):
                one = (one + _hash(self.seed, round_, other)) % high
                other = (other + _hash(self.seed, round_ + 1, one)) % low
            place = one * low + other
            if place < self.length:  # beyond it are at most ``high`` places: rarely a second time
                return place


def _hash(seed: int, round_: int, digit: int) -> int:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood, 2014) to all three."""
    mixed = (seed + (round_ + 1) * 0x9E3779B97F4A7C15 + digit * 0xD1B54A32D192ED03) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


# ---- a tokenizer for bytes ----
#
# As files that ``transformers.AutoTokenizer`` opens: the ids are the bytes.
#
# Training reads bytes and needs none. Who opens an exported model does: byte-level BPE without a merge is exactly that,
# so no network and no code of ours is needed. Its alphabet has a printable character for each byte.
#
# Source of the alphabet: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019 (encoder.py).

NUM_BYTES = 256
_PRINTABLE = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))


def tokenizer_files(config: Mapping[str, Any]) -> dict[str, str]:
    """Return file names and their texts for a transformers configuration; none where a model's tokens are not bytes."""
    if config.get("vocab_size") != NUM_BYTES:
        return {}
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.get("max_position_embeddings"),
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": _json_text(byte_tokenizer()), "tokenizer_config.json": _json_text(about)}


def alphabet() -> list[str]:
    """Return the character that stands for each byte: itself where it is printable, else the next one from 256 on."""
    others = (byte for byte in range(NUM_BYTES) if byte not in _PRINTABLE)
    moved = {byte: chr(NUM_BYTES + index) for index, byte in enumerate(others)}
    return [moved.get(byte, chr(byte)) for byte in range(NUM_BYTES)]


def byte_tokenizer() -> dict[str, Any]:  # Any: JSON
    """Return what ``tokenizer.json`` says where the tokens are bytes."""
    by_byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocab = {character: byte for byte, character in enumerate(alphabet())}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": by_byte,
        "decoder": by_byte,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def _json_text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"
