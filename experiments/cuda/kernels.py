"""What a device makes of a pseudo-gradient, against what it copies: every quantiser, and whole sparse encodes.

python -m experiments.cuda.kernels --device cuda --out kernels.json
python -m experiments.cuda.kernels --device cpu --million 2 --sparse 2

A copy reads and writes a tensor; a quantiser reads it and writes its codes. ``share`` is the time of the copy over that
of the quantiser, the best of several. A whole encode is from the gradient on the device to the bytes of the body, with
what is owed before and after; ``on_device`` is its part before the processor codes what came.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decentral.compressors import parse_compressor, parse_feedback
from decentral.replica.codec import Codec
from decentral.wire import body

QUANTISERS = ("int8", "int4", "fp8", "e3m0", "nf4", "sign", "fp16", "bf16", "natural", "qsgd", "codebook8", "signmag2")
SPARSE = "topk(k=64, chunk=4096) >> signmag2"
Rows = list[dict[str, Any]]


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--million", type=float, default=125.0, help="values of a quantiser")
    parser.add_argument("--sparse", type=float, nargs="+", default=[31.5, 125.0, 1000.0], help="millions of values")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    device = torch.device(given.device)
    rows: Rows = []
    for row in measured(given, device):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps(rows, indent=1))


def measured(given: argparse.Namespace, device: torch.device) -> Any:
    """One row after the other."""
    yield {"device": name_of(device), "torch": torch.__version__}
    for million in given.sparse:
        yield from guarded(lambda million=million: sparse(million, device))
    yield from quantisers(given.million, device)


def quantisers(million: float, device: torch.device) -> Any:
    """A copy, then each of them, on the same values."""
    value_N = torch.randn(round(million * 1e6), device=device)
    into_N = torch.empty_like(value_N)
    copy = best(partial(into_N.copy_, value_N), device)
    del into_N
    yield {"copy": copy, "GBps_read_and_written": round(8 * value_N.numel() / copy / 1e9, 1)}
    for spelling in QUANTISERS:
        yield from guarded(lambda spelling=spelling: quantiser(spelling, value_N, copy, device))


def guarded(work: Callable[[], Rows]) -> Rows:
    """One that fails does not end the others."""
    try:
        return work()
    except Exception:  # noqa: BLE001 - it is told
        return [{"failed": traceback.format_exc().splitlines()[-6:]}]


def quantiser(spelling: str, value_N: Tensor, copy: float, device: torch.device) -> Rows:
    """One quantiser on a flat tensor."""
    method = parse_compressor(spelling)
    shaped = value_N[: value_N.numel() // 64 * 64].view(-1, 64) if spelling == "signmag2" else value_N
    began = time.perf_counter()
    payload = method.compress_one(shaped)
    wait(device)
    first = time.perf_counter() - began  # with the making of kernels
    encode, decode = (
        best(lambda: method.compress_one(shaped), device),
        best(lambda: method.decompress_one(payload), device),
    )
    lost = float((method.decompress_one(payload) - shaped).norm() / shaped.norm())
    row = {"quantiser": spelling, **speed(encode, shaped, copy), "first_s": round(first, 2), "error": round(lost, 4)}
    return [{**row, "decode_GBps": speed(decode, shaped, copy)["GBps"]}]


def sparse(million: float, device: torch.device) -> Rows:
    """The default method's whole encode, of a Llama's shapes; the second and later ones have a debt."""
    shapes = llama(million)
    numel = sum(math.prod(shape) for shape in shapes)
    codec = Codec(parse_compressor(SPARSE), parse_feedback("ef"))
    gradient_N = torch.randn(numel, device=device)
    state: dict[str, Tensor] = {}
    whole, on_device, coding = [], [], []
    for _ in range(6):
        wait(device)
        began = time.perf_counter()
        sending = codec.feedback.send(codec.compressor, gradient_N, state, shapes)
        wait(device)
        on_device.append(time.perf_counter() - began)
        del sending
        began = time.perf_counter()
        made = codec.encode(gradient_N, state, shapes)
        whole.append(time.perf_counter() - began)
        began = time.perf_counter()
        body.encode(codec.compressor, made.payloads)
        coding.append(time.perf_counter() - began)
        state = dict(made.feedback)
    row: dict[str, Any] = {"sparse": SPARSE, "million": round(numel / 1e6, 1), "tensors": len(shapes)}
    row |= {"GBps": round(4 * numel / min(whole) / 1e9, 2), "ms": ms(min(whole)), "first_ms": ms(whole[0])}
    row |= {"on_device_ms": ms(min(on_device)), "coding_ms": ms(min(coding)), "body": len(made.body)}
    return [row]


def llama(million: float) -> Sequence[tuple[int, ...]]:
    """Shapes of about so many parameters: layers grow with the square root."""
    hidden = {True: 512, False: 768}[million < 60] if million < 500 else 2048
    up, each = hidden * 8 // 3, 0
    layer: list[tuple[int, ...]] = [*[(hidden, hidden)] * 4, *[(up, hidden)] * 2, (hidden, up), (hidden,), (hidden,)]
    each = sum(math.prod(shape) for shape in layer)
    table = (min(8192, max(256, round(million * 1e5 / hidden))), hidden)
    layers = max(1, round((million * 1e6 - math.prod(table)) / each))
    return [table, *layer * layers, (hidden,)]


def best(work: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """Seconds of the fastest of several; before them one that nobody counts."""
    work()
    found = []
    for _ in range(times):
        wait(device)
        began = time.perf_counter()
        work()
        wait(device)
        found.append(time.perf_counter() - began)
    return min(found)


def speed(seconds: float, value: Tensor, copy: float) -> dict[str, Any]:
    """Of float32 that goes in."""
    return {"ms": ms(seconds), "GBps": round(4 * value.numel() / seconds / 1e9, 1), "share": round(copy / seconds, 3)}


def ms(seconds: float) -> float:
    """Milliseconds."""
    return round(1000 * seconds, 3)


def wait(device: torch.device) -> None:
    """Until all that the device was asked for is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def name_of(device: torch.device) -> str:
    """As its maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "processor"


if __name__ == "__main__":
    main()
