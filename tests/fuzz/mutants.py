"""A fuzzer that knows what a frame is made of: fields, streams, tables of shares, states, words, side bytes.

It takes valid frames of every kind and compressor, and frames of parts that no compressor makes, changes a few of
their pieces, and hashes and signs them again, so that what is wrong is found behind the signature. Every mutant goes
the whole way of a frame that came in. A seed gives the same mutants every time.
"""

from __future__ import annotations

import contextlib
import random
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from decentral.coding import PREFIX_NBYTES, Floats, Rising, rans
from decentral.compressors import PartSpec, Payload
from decentral.errors import PayloadError
from decentral.replica.codec import Codec, Shapes, numel
from decentral.wire import body
from decentral.wire.frames import HEADER_NBYTES, FrameKind, Header, seal
from tests.fuzz.targets import ANCHOR, PEERS, PLAN, ROUND, RUN, SIGNERS, inbox, read_body, sealed, take_frame

# (offset, bytes) of a header's fields, without hash and signature
FIELDS = [(0, 4), (4, 2), (6, 2), (8, 32), (40, 8), (48, 8), (56, 4), (60, 4), (64, 4), (68, 4), (72, 32)]
FIELDS += [(104, 32), (136, 4), (140, 4), (144, 8)]
EDGES = [0, 1, 2, 3, 4, 5, 15, 16, 17, 127, 128, 255, 256, 2**14, 2**15 - 1, 2**15, 2**16 - 1, 2**16, 2**31 - 1, 2**31]
EDGES += [2**32 - 1, 2**32 - 4, ROUND, ROUND + 1, ROUND + 2, PLAN, PLAN + 1]
STATES_NBYTES = 16
SLOW = 2.0  # s for a frame of some hundred bytes: worse than a crash


@dataclass(frozen=True)
class Seed:
    """A frame to start from; ``cuts`` are where the pieces of its body begin, and its end."""

    spelling: str
    codec: Codec
    head: bytes
    body: bytes
    cuts: tuple[int, ...]
    shapes: Shapes


class Crash(Exception):
    """A mutant raised something else than PayloadError, or took too long."""

    def __init__(self, target: str, data: bytes, why: str) -> None:
        super().__init__(why)
        self.target, self.data = target, data

    def save(self, folder: Path) -> Path:
        """Write it down, ready to be moved into the corpus."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{len(list(folder.iterdir())):04d}.bin"
        path.write_bytes(self.data)
        path.with_suffix(".txt").write_text(f"{self.target}\n{self}\n", encoding="utf-8")
        return path


def headers() -> Iterator[Header]:
    """One of every kind and place."""
    plain = (RUN, 1, ROUND)
    for fragment in (0, 1):
        yield Header(FrameKind.CONTRIBUTION, *plain, fragment, 0, 1, 0, ANCHOR, PEERS[0], 30, 15360)
        yield Header(FrameKind.SWAP, *plain, fragment, 0, 1, 0, ANCHOR, PEERS[1], 0, 0, 1)
        yield Header(FrameKind.MERGE, *plain, fragment, 0, 1, 0, ANCHOR, PEERS[2], 1, 1)
    for part in (0, 1):
        yield Header(FrameKind.SLICE, *plain, 0, part, 2, PLAN, ANCHOR, PEERS[2], 0, 0)
        yield Header(FrameKind.RESULT, *plain, 0, part, 2, PLAN, ANCHOR, PEERS[part], 0, 0)


def seeds(spelling: str, rng: random.Random) -> list[Seed]:
    """Valid frames, and signed frames of parts that no compressor makes."""
    found = []
    for header in headers():
        receiver = inbox(spelling)
        codec, shapes = receiver.codec_of(header), receiver.shapes_of(header)
        signer = SIGNERS[PEERS.index(header.sender)]
        bodies = [_valid_body(codec, shapes, scale) for scale in (1.0, 1e-30, 0.0)]
        bodies += [_hostile_body(codec, shapes, rng) for _ in range(6)]
        if header.kind == FrameKind.SWAP:
            del bodies[2:]  # twice as long and no other code
        for content in bodies:
            head = seal(header, content, signer).data[:HEADER_NBYTES]
            found.append(Seed(spelling, codec, head, content, _cuts(codec, shapes, content), shapes))
    return found


def _valid_body(codec: Codec, shapes: Shapes, scale: float) -> bytes:
    values = torch.randn(numel(shapes), generator=torch.Generator().manual_seed(numel(shapes)))
    return bytes(codec.encode(values * scale, {}, shapes).body)


def _hostile_body(codec: Codec, shapes: Shapes, rng: random.Random) -> bytes:
    """Parts of the right dtypes and sizes, most of them right, one of them anything."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    payloads = [codec.compressor.compress_one(torch.randn(shape, generator=generator)) for shape in shapes]
    specs = [codec.compressor.layout(shape) for shape in shapes]
    names = sorted({spec.name for layout in specs for spec in layout})
    wrong = rng.choice(names)
    changed = []
    for layout, payload in zip(specs, payloads, strict=True):
        parts = (
            _anything(spec, rng) if spec.name == wrong else part
            for spec, part in zip(layout, payload.parts, strict=True)
        )
        changed.append(Payload(payload.shape, tuple(parts)))
    return body.encode(codec.compressor, changed)


def _anything(spec: PartSpec, rng: random.Random) -> torch.Tensor:
    """Any values that the coding can write."""
    count = int(np.prod(spec.shape))
    if isinstance(spec.kind, Rising):
        rows = [sorted(rng.sample(range(spec.kind.limit), spec.shape[1])) for _ in range(spec.shape[0])]
        return torch.tensor(rows, dtype=spec.dtype).reshape(spec.shape)
    if isinstance(spec.kind, Floats):
        patterns = [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0x8000, 0x0001, 0x7F7F, 0xFF7F, 0x7C00, 0x7BFF, 0x3F80, 0]
        high = np.array([rng.choice(patterns) if rng.random() < 0.3 else 0x3F80 for _ in range(count)], dtype=np.uint32)
        array = (high << 16).astype(np.uint32) if spec.dtype.itemsize == 4 else high.astype(np.uint16)
        return torch.from_numpy(array).view(spec.dtype).reshape(spec.shape)
    top = 1 << min(8, getattr(spec.kind, "bits", 8))
    few = rng.choice([1, 2, top])
    array = np.array([(top - 1 - rng.randrange(few)) % top for _ in range(count)], dtype=np.uint8)
    return torch.from_numpy(array).reshape(spec.shape)


def _cuts(codec: Codec, shapes: Shapes, content: bytes) -> tuple[int, ...]:
    """Sizes, tables, states, words and side bytes (not told apart), raw streams."""
    layout = [spec for shape in shapes for spec in codec.compressor.layout(shape)]
    at, cuts = 0, []
    for name in dict.fromkeys(spec.name for spec in layout):
        cuts += [at, at + PREFIX_NBYTES]
        size = int.from_bytes(content[at : at + PREFIX_NBYTES], "little")
        at += PREFIX_NBYTES
        if size:
            _, table = rans.read_shares(np.frombuffer(content, dtype=np.uint8)[at:])
            cuts += [at + table, at + table + STATES_NBYTES]
        at += size or sum(spec.nbytes for spec in layout if spec.name == name)
    assert at == len(content)
    return tuple(sorted({*cuts, at}))


# ---- mutation ----


def mutant(seed: Seed, others: list[Seed], rng: random.Random) -> bytes:
    """The seed with one to three changes, hashed and signed again."""
    head, content = bytearray(seed.head), bytearray(seed.body)
    if rng.random() < 0.2:
        _change_field(head, rng)
    else:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            rng.choice(_CHANGES)(content, seed, others, rng)
    return sealed(bytes(head + content))


def _change_field(head: bytearray, rng: random.Random) -> None:
    at, size = rng.choice(FIELDS)
    if size <= 8 and rng.random() < 0.7:
        head[at : at + size] = (rng.choice(EDGES) % (1 << 8 * size)).to_bytes(size, "little")
    elif rng.random() < 0.5:
        head[at + rng.randrange(size)] ^= 1 << rng.randrange(8)
    else:
        head[at : at + size] = rng.choice([bytes(size), b"\xff" * size, rng.randbytes(size), (PEERS[1] * 2)[:size]])


def _piece(content: bytearray, seed: Seed, rng: random.Random) -> tuple[int, int]:
    """Some piece that is not empty; an earlier change may have made the body shorter."""
    n = rng.randrange(len(seed.cuts) - 1) if len(seed.cuts) > 1 else 0
    start = min(seed.cuts[n], max(0, len(content) - 1))
    stop = min(seed.cuts[n + 1] if n + 1 < len(seed.cuts) else start, len(content))
    return start, max(stop, min(start + 1, len(content)))


def _flip(content: bytearray, seed: Seed, others: list[Seed], rng: random.Random) -> None:
    start, stop = _piece(content, seed, rng)
    if stop > start:
        content[rng.randrange(start, stop)] ^= 1 << rng.randrange(8)


def _overwrite(content: bytearray, seed: Seed, others: list[Seed], rng: random.Random) -> None:
    start, stop = _piece(content, seed, rng)
    size = stop - start
    content[start:stop] = rng.choice([rng.randbytes, bytes, lambda n: b"\xff" * n])(size)


def _edge(content: bytearray, seed: Seed, others: list[Seed], rng: random.Random) -> None:
    start, _ = _piece(content, seed, rng)
    width = rng.choice((1, 2, 4))
    value = (rng.choice((*EDGES, len(content), len(content) - start)) % (1 << 8 * width)).to_bytes(width, "little")
    start += 4 * rng.randrange(4) if width == 4 and rng.random() < 0.3 else 0  # one of the states
    content[start : start + width] = value[: max(0, len(content) - start)]


def _resize(content: bytearray, seed: Seed, others: list[Seed], rng: random.Random) -> None:
    """Cut out or put in some bytes, and perhaps let the size before them follow."""
    start, stop = _piece(content, seed, rng)
    at, count = rng.randrange(start, stop + 1), rng.choice((1, 1, 2, 3, 4, 8, 16))
    if rng.random() < 0.5:
        del content[at : at + count]
        count = -count
    else:
        content[at:at] = rng.randbytes(count)
    prefixes = [cut for cut in seed.cuts if cut + PREFIX_NBYTES in seed.cuts and cut + PREFIX_NBYTES <= start]
    if prefixes and rng.random() < 0.7 and prefixes[-1] + PREFIX_NBYTES <= len(content):
        size = int.from_bytes(content[prefixes[-1] : prefixes[-1] + PREFIX_NBYTES], "little")
        struct.pack_into("<I", content, prefixes[-1], (size + count) % 2**32)


def _splice(content: bytearray, seed: Seed, others: list[Seed], rng: random.Random) -> None:
    """A piece of another frame in the place of one of ours."""
    other = rng.choice(others)
    start, stop = _piece(content, seed, rng)
    begin, end = _piece(bytearray(other.body), other, rng)
    content[start:stop] = other.body[begin:end]


def _repeat(content: bytearray, seed: Seed, others: list[Seed], rng: random.Random) -> None:
    start, stop = _piece(content, seed, rng)
    content[stop:stop] = content[start:stop]


def _truncate(content: bytearray, seed: Seed, others: list[Seed], rng: random.Random) -> None:
    del content[rng.randrange(len(content) + 1) :]


_CHANGES = [_flip] * 8 + [_overwrite] * 4 + [_edge] * 4 + [_resize] * 3 + [_splice] * 3 + [_repeat, _truncate]


# ---- running ----


@dataclass
class Count:
    """What happened."""

    frames: int = 0
    accepted: int = 0
    behind_the_signature: int = 0  # refused there
    slowest: float = 0.0  # s


def run(spelling: str, num_frames: int, rng_seed: str, count: Count) -> None:
    """Send that many mutants the whole way. Raises Crash."""
    rng = random.Random(f"{spelling} {rng_seed}")
    found = seeds(spelling, rng)
    for seed in found:  # numba compiles now, and not while a frame's time is taken
        _whole_way(seed, seed.head + seed.body, True, Count())
    for n in range(num_frames):
        seed = found[rng.randrange(len(found))]
        data = mutant(seed, found, rng)
        started = time.perf_counter()
        _whole_way(seed, data, n % 16 == 0, count)
        taken = time.perf_counter() - started
        count.slowest = max(count.slowest, taken)
        count.frames += 1
        if taken > SLOW:
            raise Crash(f"frame {spelling}", data, f"took {taken:.1f} s")


def _whole_way(seed: Seed, data: bytes, add: bool, count: Count) -> None:
    try:
        _take(seed, data, count)
        if add:
            _add(seed, data[HEADER_NBYTES:])
    except Exception as error:
        raise Crash(f"frame {seed.spelling}", data, repr(error)) from error


def _take(seed: Seed, data: bytes, count: Count) -> None:
    try:
        take_frame(seed.spelling, data)
    except PayloadError as error:
        count.behind_the_signature += not str(error).startswith("frame")
    else:
        count.accepted += 1


def _add(seed: Seed, content: bytes) -> None:
    """The same body added to a sum, whatever the header says."""
    if len(content) <= seed.codec.max_body_nbytes(seed.shapes):
        with contextlib.suppress(PayloadError):
            read_body(seed.codec, seed.shapes, content)
