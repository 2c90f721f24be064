"""zstd frames of a size that the reader knows, for bytes whose patterns are shares and not repetitions: float32, say;
and for text, whose patterns are repetitions.

Crosses the wire: a frame of RFC 8878 with its content's size, without dictionary, checksum or skippable frames.
A writer's piece is a block, or several, with a table of its own; no matches are looked for but runs, which makes the
exponents of trained weights 0.33 of their bytes at 2 GB/s, where levels 1 and 3 make them 0.38 and 0.42: a match costs
more than the few symbols that it stands for (experiments/LOG.md).

A stranger's frame is bounded before a byte of it is expanded: `decompress(max_output_size=N)` ignores N when the header
declares a size, and made 1 GiB of 32 KB.
"""

from collections.abc import Sequence

import numpy as np
import zstandard

from decentral.errors import PayloadError

__all__ = ["read_float_frame", "read_frame", "write_float_frame", "write_frame", "write_text_frame"]

_MAGIC = bytes.fromhex("28b52ffd")  # of a frame that is no skippable one and none of zstd before 0.8
_LEAST_WINDOW = 1 << 10  # bytes; the format has no smaller one
_MOST_BLOCKS = 64  # of a frame: empty ones cost three bytes and a turn of a loop each
_BLOCK_HEAD = 3  # bytes: last u1, type u2, size u21
_RUN = 1  # type of a block whose one byte stands for as many as its size
_LEVEL_OF_TEXT = 3  # 6 makes the same source 9 % shorter, in three times as long
_SHARES_ONLY = {
    "strategy": zstandard.STRATEGY_FAST,
    "min_match": 7,  # the longest
    "hash_log": 6,  # 64 places to find one at: the least
    "chain_log": 6,
    "search_log": 1,
    "target_length": 0,  # above 0 this strategy leaves literals as they are
}


def write_frame(pieces: Sequence[bytes | memoryview]) -> bytes:
    """Return the frame of all pieces, one after the other."""
    nbytes = sum(len(piece) for piece in pieces)
    window_log = min(max(nbytes.bit_length(), _LEAST_WINDOW.bit_length() - 1), 20)
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, write_checksum=0, **_SHARES_ONLY)
    writer = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=nbytes)
    out = []
    for piece in pieces:
        out += [writer.compress(piece), writer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*out, writer.flush()])


def write_text_frame(data: bytes) -> bytes:
    """Return the frame of a text, whose repetitions are looked for: 0.24 of Python's own source, at 72 MB/s."""
    return bytes(zstandard.ZstdCompressor(level=_LEVEL_OF_TEXT, write_checksum=False).compress(data))


def read_frame(data: bytes, nbytes: int) -> bytes:
    """Return the ``nbytes`` that the frame ``data``, all of it, stands for.

    Raises PayloadError when it is not one frame of exactly so many; memory: ``nbytes``, and as much again for zstd.
    """
    _check_head(data, nbytes)
    if (end := _end_of(data)) != len(data):
        raise _refusal("it is cut short" if end > len(data) else f"{len(data) - end} bytes follow its end")
    try:
        reader = zstandard.ZstdDecompressor(max_window_size=max(nbytes, _LEAST_WINDOW)).stream_reader(data)
        content: bytes = reader.read(nbytes + 1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise _refusal(f"zstd cannot read it ({error})") from None
    if len(content) != nbytes:
        raise _refusal(f"it does not expand to {nbytes} bytes")
    return content


def _check_head(data: bytes, nbytes: int) -> None:
    if data[:4] != _MAGIC:
        raise _refusal("it does not begin as one")
    try:
        head = zstandard.get_frame_parameters(data)
    except zstandard.ZstdError:
        raise _refusal("its head is damaged or cut short") from None
    if head.content_size != nbytes:
        said = "no size" if head.content_size == zstandard.CONTENTSIZE_UNKNOWN else f"{head.content_size} bytes"
        raise _refusal(f"it declares {said} where {nbytes} bytes belong")
    if head.window_size > max(nbytes, _LEAST_WINDOW):
        raise _refusal(f"a window of {head.window_size} bytes for {nbytes}")
    if head.dict_id or head.has_checksum:
        raise _refusal("it has a dictionary or a checksum of its own")


def _end_of(data: bytes) -> int:
    """Where the frame ends by the heads of its blocks; beyond the data when it is cut short."""
    at = zstandard.frame_header_size(data)
    for _ in range(_MOST_BLOCKS):
        head = int.from_bytes(data[at : at + _BLOCK_HEAD], "little")
        at += _BLOCK_HEAD + (1 if head >> 1 & 3 == _RUN else head >> 3)
        if head & 1 or at > len(data):
            return at
    raise _refusal(f"more than {_MOST_BLOCKS} blocks")


def _refusal(what: str) -> PayloadError:
    return PayloadError(f"zstd frame refused: {what}; drop the message and its sender")


# ---- float32 by planes of bytes ----
#
# Exponents of trained weights are alike, signs and most of the mantissas are noise.
#
# The bits of each number are turned left by one, so that the highest byte holds the exponent, all of it; then all
# lowest bytes come first, and so on. Each plane is a piece of one zstd frame and gets a table of its own: one for two
# planes made an anchor 0.88 of its bytes where this makes it 0.833. zstd leaves noise as it is. What has fewer than 24
# bits of mantissa, as weights that came from bfloat16 have, has planes of zeros, which take nothing.

_ONE, _REST = np.uint32(1), np.uint32(31)


def write_float_frame(data: bytes) -> bytes:
    """Write little-endian float32 as a zstd frame; it is not shorter where there is no pattern."""
    numbers = np.frombuffer(data, dtype="<u4")
    turned = ((numbers << _ONE) | (numbers >> _REST)).astype("<u4", copy=False)
    planes = np.ascontiguousarray(turned.view(np.uint8).reshape(-1, 4).T)
    return write_frame([plane.data for plane in planes])


def read_float_frame(data: bytes, nbytes: int) -> bytes:
    """Return the ``nbytes``, a multiple of four, of a frame of floats. Raises PayloadError, with bounded memory."""
    planes = np.frombuffer(read_frame(data, nbytes), dtype=np.uint8).reshape(4, -1)
    turned = np.ascontiguousarray(planes.T).view("<u4").reshape(-1)
    return ((turned >> _ONE) | (turned << _REST)).astype("<u4", copy=False).tobytes()
