"""The last stage of every method, by four coders: our rANS, zstd at three levels, zstd's Huffman alone, constriction.

    OMP_NUM_THREADS=1 python -m experiments.coding.measure CHECKPOINT/tensors.safetensors

What is coded is what each method's parts are before the last stage, of the outer momentum of a DiLoCo run: the mean
pseudo-gradient, smoothed. All coders see the same symbols, and the bits beside them that have no pattern count for all.
constriction is not a dependency: its columns are there when it can be imported.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import zstandard
from safetensors.torch import load_file

from decentral import coding
from decentral.coding import rans
from decentral.coding.zstd import read_frame, write_frame
from decentral.compressors import describe_compressors, parse_compressor
from decentral.compressors.base import compress_flat
from decentral.parameters import Schema
from decentral.wire import body

REPEATS = 5
CHAINS = ("topk(k=64, chunk=4096) >> signmag2", "topk(k=64, chunk=4096) >> int8(block=4096)")


@dataclass(frozen=True)
class Coder:
    name: str
    encode: Callable[[np.ndarray], object]
    nbytes: Callable[[object], int]
    decode: Callable[[object, int], np.ndarray]


def rans_encode(symbols: np.ndarray) -> bytes:
    shares = rans.shares_of(rans.counts(symbols))
    return b"".join(piece.tobytes() for piece in (rans.write_shares(shares), *rans.encode(symbols, shares)))


def rans_decode(data: bytes, size: int) -> np.ndarray:
    found = np.empty(size, dtype=np.uint8)
    array = np.frombuffer(data, dtype=np.uint8)
    shares, start = rans.read_shares(array)
    assert rans.decode(array[start:], shares, found)
    return found


def zstd(level: int) -> Coder:
    return Coder(
        f"zstd {level}",
        lambda symbols: zstandard.ZstdCompressor(level=level).compress(symbols.data),
        len,
        lambda data, size: np.frombuffer(read_frame(data, size), dtype=np.uint8),
    )


def coders() -> list[Coder]:
    ours = Coder("ours", rans_encode, len, rans_decode)
    huffman = Coder(
        "zstd, shares",
        lambda symbols: write_frame([symbols.data]),
        len,
        lambda data, size: np.frombuffer(read_frame(data, size), dtype=np.uint8),
    )
    return [ours, zstd(1), zstd(3), zstd(9), huffman, *constriction_coder()]


def constriction_coder() -> list[Coder]:
    try:
        import constriction
    except ImportError:
        return []
    ans = constriction.stream.stack.AnsCoder

    def model(shares: np.ndarray) -> object:
        return constriction.stream.model.Categorical((shares / shares.sum()).astype(np.float32), perfect=False)

    def encode(symbols: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        shares = rans.shares_of(rans.counts(symbols))
        table = rans.write_shares(shares).size
        coder = ans()
        coder.encode_reverse(symbols.astype(np.int32), model(shares))
        return coder.get_compressed(), shares, table

    def decode(data: tuple[np.ndarray, np.ndarray, int], size: int) -> np.ndarray:
        return ans(data[0]).decode(model(data[1]), size).astype(np.uint8)

    return [Coder("constriction", encode, lambda data: data[0].nbytes + data[2], decode)]


def quickest(work: Callable[[], object]) -> tuple[float, object]:
    took, found = float("inf"), None
    for _ in range(REPEATS):
        began = time.perf_counter()
        found = work()
        took = min(took, time.perf_counter() - began)
    return took, found


def gradient_of(path: Path) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    found = load_file(path)
    meta = json.loads((path.parent / "meta.json").read_text(encoding="utf-8"))["document"]["meta"]
    fragment = Schema.from_json(meta["parameters"]).fragments[0]
    return found["outer/0/momentum"], list(fragment.shapes)


def streams_of(spelling: str, gradient: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[tuple[list, list]]:
    """Kinds and arrays of every stream that the method's body has."""
    seen, encode = [], coding.encode
    coding.encode = lambda kinds, arrays, *rest: (
        seen.append((list(kinds), list(arrays))),
        encode(kinds, arrays, *rest),
    )[1]
    try:
        compressor = parse_compressor(spelling)
        body.encode(compressor, compress_flat(compressor, gradient, shapes))
    finally:
        coding.encode = encode
    return seen


def row(spelling: str, gradient: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[str]:
    streams = streams_of(spelling, gradient, shapes)
    coded, raw, beside = [], 0, 0
    for kinds, arrays in streams:
        pairs = [kind.to_symbols(array) for kind, array in zip(kinds, arrays, strict=True)]
        coded.append(np.concatenate([symbols for symbols, _ in pairs]))
        beside += sum(piece.size for _, side in pairs for piece in side)
        raw += sum(kind.raw_nbytes(a.shape, a.dtype.itemsize) for kind, a in zip(kinds, arrays, strict=True))
    cells = [f"`{spelling}`", f"{raw:,}", f"{beside:,}"]
    total = sum(symbols.size for symbols in coded)
    for coder in coders():
        took, data = quickest(lambda coder=coder: [coder.encode(symbols) for symbols in coded])
        back, again = quickest(
            lambda coder=coder, data=data: [coder.decode(d, s.size) for d, s in zip(data, coded, strict=True)]
        )
        assert all(np.array_equal(a, s) for a, s in zip(again, coded, strict=True))
        nbytes = beside + sum(coder.nbytes(one) for one in data)
        cells.append(f"{nbytes:,}; {total / 1e6 / took:.0f}, {total / 1e6 / back:.0f}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    gradient, shapes = gradient_of(parser.parse_args().checkpoint)
    torch.set_num_threads(1)
    names = [coder.name for coder in coders()]
    print("| method | raw bytes | without a pattern | " + " | ".join(f"{n}: bytes; M/s in, out" for n in names) + " |")
    print("|---" * (3 + len(names)) + "|")
    for spelling in [*(str(one["spelling"]) for one in describe_compressors()), *CHAINS]:
        print("| " + " | ".join(row(spelling, gradient, shapes)) + " |", flush=True)


if __name__ == "__main__":
    main()
