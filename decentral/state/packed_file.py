"""A file packed for the way, five sixths of a safetensors file of float32, and the very same file again.

Layout, little-endian: magic "DCPK", bytes of the file u64; then for each 256 KiB of it a length u32 and the chunk in a
form (`chunk_form`); then the blake2b-256 of the file. A stranger may have made it: no chunk is expanded beyond its
size, and memory stays at one.
"""

import struct
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from decentral.errors import DiskError, PayloadError
from decentral.state.chunk_form import BY_PLANES, HEAD_NBYTES, from_form, to_form
from decentral.state.durable import DISK, Disk, disk_errors
from decentral.state.snapshot import CHUNK_NBYTES
from decentral.state.tensor_file import OnBytes, untold

_HEAD = struct.Struct("<4sQ")
_MAGIC = b"DCPK"
_LENGTH = struct.Struct("<I")
_HASH_NBYTES = 32


def pack_file(plain: Path, packed: Path, disk: Disk = DISK, on_bytes: OnBytes = untold) -> None:
    """Write ``packed``, a new file; ``on_bytes`` is told how many more of ``plain`` are in it. Raises OSError."""
    with plain.open("rb") as file:
        disk.write(packed, _told(_packed(file, nbytes := plain.stat().st_size), nbytes, on_bytes))


def unpack_file(packed: Path, plain: Path, disk: Disk = DISK, on_bytes: OnBytes = untold) -> None:
    """Write ``plain``, a new file, as it was; none stays when DiskError is raised.

    ``on_bytes`` is told how many more are written.
    """
    with disk_errors(f"unpacking {packed} to {plain}"):
        try:
            with packed.open("rb") as file:
                disk.write(plain, _counted(_unpacked(file), on_bytes))
        except PayloadError as error:
            disk.remove(plain)
            why = str(error).split(";")[0]  # its way out is for peers
            raise DiskError(f"{packed} is damaged ({why}); copy it again") from None
        except BaseException:
            disk.remove(plain)
            raise


def _counted(parts: Iterator[bytes], on_bytes: OnBytes) -> Iterator[bytes]:
    for part in parts:
        yield part
        on_bytes(len(part))


def _told(parts: Iterator[bytes], nbytes: int, on_bytes: OnBytes) -> Iterator[bytes]:
    """``parts``: a head, then one for each chunk of a file of ``nbytes``, then a seal."""
    yield next(parts)
    for size, part in zip(_sizes(nbytes), parts, strict=False):
        yield part
        on_bytes(size)
    yield from parts


def _packed(file: BinaryIO, nbytes: int) -> Iterator[bytes]:
    seal = blake2b(digest_size=_HASH_NBYTES)
    yield _HEAD.pack(_MAGIC, nbytes)
    for size in _sizes(nbytes):
        chunk = _read(file, size)
        seal.update(chunk)
        form = to_form(chunk, BY_PLANES if size % 4 == 0 else 0)
        yield _LENGTH.pack(len(form)) + form
    yield seal.digest()


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    magic, nbytes = _HEAD.unpack(_read(file, _HEAD.size))
    if magic != _MAGIC:
        raise PayloadError("it does not begin as a packed file")
    seal = blake2b(digest_size=_HASH_NBYTES)
    for size in _sizes(nbytes):
        (length,) = _LENGTH.unpack(_read(file, _LENGTH.size))
        if length > size + HEAD_NBYTES:
            raise PayloadError(f"a chunk of {size} bytes has {length}")
        chunk = from_form(_read(file, length), size)
        seal.update(chunk)
        yield chunk
    if _read(file, _HASH_NBYTES) != seal.digest() or file.read(1):
        raise PayloadError("its hash is another, or something follows it")


def _sizes(nbytes: int) -> Iterator[int]:
    for begin in range(0, nbytes, CHUNK_NBYTES):
        yield min(CHUNK_NBYTES, nbytes - begin)


def _read(file: BinaryIO, nbytes: int) -> bytes:
    data = file.read(nbytes)
    if len(data) != nbytes:
        raise PayloadError("it is cut short")
    return data
