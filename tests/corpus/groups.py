"""Machines that become one replica, and what crosses between its stages."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch

from decentral.pipeline.boundary import Int8
from decentral.wire.codecs import to_bytes
from decentral.wire.groups import GroupRecord, Offered, Sealed, sign_group
from tests.fuzz.targets import PEERS, RUN, SIGNERS
from tests.kit.builders import ACCEPTED, Entry, put


def _groups() -> Iterator[Entry]:
    """Machines that become one replica: what one offers, the record, the seal of all."""
    yield "group offered", "as it should be", to_bytes(Offered(6 * 10**9, 10**12, 0)), ACCEPTED
    yield "group offered", "without speed", bytes(24), "it has no speed"
    yield "group offered", "less one", bytes(23), "cut short"
    stages = tuple((peer, place, place + 1) for place, peer in enumerate(PEERS))
    record = GroupRecord(RUN, 7, stages, 8, 1)
    good, at = to_bytes(record), 32 + 8 + 4  # of the first stage
    each = 32 + 4
    yield "group record", "as it should be", good, ACCEPTED
    yield "group record", "empty", b"", "cut short"
    yield "group record", "five stages", put(good, 40, struct.pack("<I", 5)), "5 items, at most 4"
    yield "group record", "stages 2**32-1", put(good, 40, b"\xff" * 4), "4294967295 items, at most 4"
    yield "group record", "one peer twice", put(good, at + each, PEERS[0]), "each of another peer"
    ends = [at + each * place + 32 for place in range(3)]
    gap = put(good, ends[2], struct.pack("<HH", 3, 4))
    yield "group record", "a gap", gap, ACCEPTED
    yield (
        "group record",
        "two gaps",
        put(put(good, ends[1], struct.pack("<HH", 2, 3)), ends[2], struct.pack("<HH", 4, 5)),
        "more than one place",
    )
    yield (
        "group record",
        "one before the other",
        put(good, ends[1], struct.pack("<HH", 0, 2)),
        "do not follow each other",
    )
    yield (
        "group record",
        "not from the first on",
        put(good, ends[0], struct.pack("<HH", 1, 2)),
        "do not follow each other",
    )
    yield "group record", "nothing in a stage", put(good, ends[0], struct.pack("<HH", 0, 0)), "do not follow each other"
    yield "group record", "no micro-batches", put(good, len(good) - 4, bytes(2)), "0 micro-batches"
    yield "group record", "micro-batches 65535", put(good, len(good) - 4, b"\xff\xff"), "65535 micro-batches"
    yield "group record", "rounding 3", put(good, len(good) - 2, b"\3"), "rounding 3, of which there is none"
    yield "group record", "and one", good + b"\0", "1 bytes after its end"
    sealed = to_bytes(Sealed(record, tuple(sign_group(record, signer) for signer in SIGNERS)))
    yield "group sealed", "as it should be", sealed, ACCEPTED
    yield "group sealed", "another number", put(sealed, 32, b"\x08"), "not signed by its members"
    yield "group sealed", "a signature short", sealed[:-1], "cut short"
    yield "group sealed", "a signature too few", put(sealed, len(good), b"\2")[:-64], "2 signatures of 3 members"


def _stage_bodies() -> Iterator[Entry]:
    """What the first stage of three sends to the second: states as int8, 2 x 3 x 5."""
    states = b"".join(one.contiguous().view(torch.uint8).numpy().tobytes() for one in Int8().pack(torch.ones(2, 3, 5)))

    def body(kind: int, values: bytes = b"", step: int = 0, micro: int = 0) -> bytes:
        return struct.pack("<BQQH", kind, 7, step, micro) + values

    yield "stage body", "as it should be", body(0, states), ACCEPTED
    yield "stage body", "of the next step", body(0, states, step=1, micro=1), ACCEPTED
    yield "stage body", "done", body(3, bytes(8 + 16)), ACCEPTED
    yield "stage body", "done of nothing", body(3, bytes(8)), ACCEPTED
    yield "stage body", "ready", body(4), ACCEPTED
    yield "stage body", "over", body(5), ACCEPTED
    yield "stage body", "empty", b"", "its head alone takes 19"
    yield "stage body", "waits for the last", body(6, b"\2"), ACCEPTED
    yield "stage body", "waits for itself", body(6, b"\0"), ACCEPTED
    yield "stage body", "kind 7", body(7), "of kind 7"
    yield "stage body", "waits for stage 3", body(6, b"\3"), "waits for stage 3, counted from 0 to 2"
    yield "stage body", "waits for nothing", body(6), "0 bytes of waits"
    yield "stage body", "waits for two", body(6, b"\1\2"), "2 bytes of waits"
    yield "stage body", "states less one", body(0, states[:-1]), f"{len(states) - 1} bytes of states"
    yield "stage body", "states and one", body(0, states + b"\0"), f"{len(states) + 1} bytes of states"
    yield "stage body", "a gradient from before", body(1, states), "not its to send here"
    yield "stage body", "targets to the middle", body(2, bytes(24)), "not its to send here"
    yield "stage body", "of step 2", body(0, states, step=2), "step 2, micro-batch 0"
    yield "stage body", "of micro-batch 2", body(0, states, micro=2), "step 0, micro-batch 2"
    yield "stage body", "of step 2**64-1", body(0, states, step=2**64 - 1), "none of ours"
    yield "stage body", "done with more norms", body(3, bytes(8 + 20)), "28 bytes of done"
    yield "stage body", "done with half a norm", body(3, bytes(8 + 2)), "10 bytes of done"
    yield "stage body", "ready with something", body(4, b"\0"), "1 bytes of ready"
    infinite = states[:30] + b"\x80\x7f" * 6
    yield "stage body", "infinite", body(0, infinite), "not finite"


def groups() -> Iterator[Entry]:
    """Every entry of this file."""
    yield from _groups()
    yield from _stage_bodies()
