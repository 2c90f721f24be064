"""A snapshot over loopback, or through a cap: chunks as they are, packed, and as the joiner chooses.

    OMP_NUM_THREADS=1 python -m experiments.catchup.loopback W [--mbit 20] [--turns 9]

Both ends in one process on the native transport, so that packing and unpacking take turns from the streams; the values
are a checkpoint's anchors over and over. The three ways take turns; medians, also of the ratios to the plain turn
beside. Processor time is that of both ends, and tells more than time on a machine with other work.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import anyio
import torch
from safetensors.torch import load_file

from decentral.dissemination.pull import fetch_chunks
from decentral.rounds.snapshots import ANY_FORM, PACKED, Chunks, Gain
from decentral.state.snapshot import Assembler, Snapshot, to_form
from decentral.transport.native.transport import NativeTransport
from decentral.transport.requests import serve_requests
from decentral.transport.throttle import Caps, ThrottledTransport
from decentral.wire.keys import Signer

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
WAYS = {"as they are": False, "packed": True, "chosen": None}


def snapshot_of(path: Path, megabytes: int) -> Snapshot:
    found = load_file(path)
    anchors = torch.cat([found[name] for name in sorted(found) if name.startswith("anchor/")])
    numel = megabytes * 250_000
    return Snapshot({"anchor/0": anchors.repeat(-(-numel // anchors.numel()))[:numel].clone()}, {})


def end(rate: float | None) -> ThrottledTransport:
    return ThrottledTransport(NativeTransport(Signer.generate(), listen=LOOPBACK), Caps(up=rate), urgent=())


async def fetch(snapshot: Snapshot, always: bool | None, rate: float | None) -> tuple[float, float, int]:
    """Seconds, those of the processor, and how many chunks were asked for packed."""
    donor, joiner = end(rate), end(None)
    asked = 0

    async def answer(peer: bytes, data: bytes) -> bytes:
        nonlocal asked
        _, number, forms = ANY_FORM.unpack(data)
        asked += forms
        return to_form(snapshot.chunk(number), forms)

    serve_requests(donor, PACKED, answer, limit=ANY_FORM.size)
    async with donor, joiner:
        await joiner.connect(donor.peer, donor.addresses())
        chunks = Chunks(joiner, snapshot.index, 30.0)
        if always is not None:
            chunks.gain = Always(always)
        began, spent = time.perf_counter(), time.process_time()
        await fetch_chunks(Assembler(snapshot.index), chunks.ask, lambda: [donor.peer], lambda peer, error: None)
        return time.perf_counter() - began, time.process_time() - spent, asked


class Always(Gain):
    """One form, whatever comes."""

    def came(self, chunk_nbytes: int, now: float, *, packed: bool) -> None:
        """Nothing follows from it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, help="tensors.safetensors of a checkpoint")
    parser.add_argument("--mbit", type=float, help="cap of the donor's uplink")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    rate = None if options.mbit is None else options.mbit * 125_000
    snapshot = snapshot_of(options.weights, options.megabytes)
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    spent: dict[str, list[float]] = {way: [] for way in WAYS}
    packed: dict[str, list[int]] = {way: [] for way in WAYS}
    for _ in range(options.turns):
        for way, always in WAYS.items():
            seconds, processor, asked = anyio.run(fetch, snapshot, always, rate)
            took[way].append(seconds)
            spent[way].append(processor)
            packed[way].append(asked)
    num_chunks = snapshot.index.layout.num_chunks
    for way in WAYS:
        print(
            f"{way:<12}{median(took[way]):8.3f} s ({min(took[way]):.3f} to {max(took[way]):.3f}), "
            f"{_over(took[way], took['as they are'])}; of processor {median(spent[way]):.3f} s, "
            f"{_over(spent[way], spent['as they are'])}; {median(packed[way]):.0f} of {num_chunks} asked for packed"
        )


def _over(found: list[float], plain: list[float]) -> str:
    """The median of what the turns make, each over the plain one beside it."""
    return f"{100 * (median(a / b for a, b in zip(found, plain, strict=True)) - 1):+.1f} %"


if __name__ == "__main__":
    main()
