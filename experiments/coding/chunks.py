"""What 256 KiB chunks of a trained run's anchor and outer state come to: ratio, MB/s of plain bytes each way.

OMP_NUM_THREADS=1 python -m experiments.coding.chunks CHECKPOINT/tensors.safetensors
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zstandard
from safetensors.torch import load_file

from decentral import coding
from decentral.coding import Floats, Form, zstd
from decentral.coding.zstd import read_frame
from decentral.state.snapshot import CHUNK_NBYTES
from experiments.coding.measure import quickest

Way = tuple[Callable[[bytes], bytes], Callable[[bytes, int], object]]


def shuffled(data: bytes) -> bytes:
    """Byte planes one after the other, as they are."""
    return np.ascontiguousarray(np.frombuffer(data, dtype=np.uint8).reshape(-1, 4).T).tobytes()


def unshuffled(data: bytes) -> bytes:
    return np.ascontiguousarray(np.frombuffer(data, dtype=np.uint8).reshape(4, -1).T).tobytes()


def by_zstd(level: int) -> Way:
    return lambda data: zstandard.ZstdCompressor(level=level).compress(data), read_frame


def by_shuffled_zstd(level: int) -> Way:
    return (
        lambda data: zstandard.ZstdCompressor(level=level).compress(shuffled(data)),
        lambda data, size: unshuffled(read_frame(data, size)),
    )


def by_rans(data: bytes) -> bytes:
    return b"".join(coding.encode([Floats()], [np.frombuffer(data, dtype="<u4")]))


def from_rans(data: bytes, size: int) -> object:
    form = Form(Floats(), (size // 4,), np.dtype("<u4"))
    return coding.decode([form], np.frombuffer(data, dtype=np.uint8))[0][0].tobytes()


WAYS: dict[str, Way] = {
    **{f"zstd {level}": by_zstd(level) for level in (1, 3, 9)},
    **{f"planes in one piece, zstd {level}": by_shuffled_zstd(level) for level in (1, 3, 9)},
    "planes.pack": (zstd.write_float_frame, zstd.read_float_frame),
    "our rANS of exponents": (by_rans, from_rans),
}


def table(name: str, data: bytes) -> None:
    chunks = [data[at : at + CHUNK_NBYTES] for at in range(0, len(data), CHUNK_NBYTES)]
    print(f"{name}, {len(data)} bytes\n| way | of the bytes | MB/s in | MB/s out |\n|---|---|---|---|")
    for way in WAYS:
        row(way, chunks)


def row(way: str, chunks: list[bytes]) -> None:
    pack, unpack = WAYS[way]
    took, packed = quickest(lambda: [pack(chunk) for chunk in chunks])
    back, found = quickest(lambda: [unpack(p, len(c)) for p, c in zip(packed, chunks, strict=True)])
    assert found == chunks
    size = sum(map(len, chunks))
    share, mega = sum(map(len, packed)) / size, size / 1e6
    print(f"| {way} | {share:.4f} | {mega / took:.0f} | {mega / back:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    for name, tensor in load_file(parser.parse_args().checkpoint).items():
        if name.startswith(("anchor/", "outer/")):
            table(name, tensor.numpy().tobytes())
        if name.startswith("anchor/"):
            table(f"{name} rounded to bfloat16", tensor.bfloat16().float().numpy().tobytes())


if __name__ == "__main__":
    main()
