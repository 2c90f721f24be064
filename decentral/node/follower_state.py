"""What a follower keeps to go on from after a restart: one anchor with its outer state, and where the chain stood.

With it the missed commits are replayed where that is less than a snapshot. A journal is not needed, as a follower
promises nothing; what a crash loses the others have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from decentral.compressors import parse_feedback
from decentral.consensus.chain import Head
from decentral.errors import DeviceError, DiskError, ManifestMismatch
from decentral.manifest import Manifest, check_methods
from decentral.node.folder import kept_terms
from decentral.node.follower import Anchor
from decentral.optimizers import make_outer
from decentral.parameters import Schema
from decentral.state.checkpoint import load_newest, save
from decentral.state.snapshot import Layout

STATE = "following"  # folder of the state


@dataclass(frozen=True, slots=True)
class FollowerState:
    """What is known of the run before its peers are met: from the folder, or from the first that answered."""

    manifest: Manifest
    schema: Schema
    head: Head | None = None  # and where an earlier process stood
    tensors: dict[str, Tensor] | None = None
    gossip_step: int = 0
    ways: tuple[str, ...] = ()  # addresses of peers that were there then


def kept_state(out: Path, run: bytes) -> FollowerState | None:
    """Where an earlier process stood; None where there is nothing, or nothing whole. Raises ManifestMismatch."""
    manifest = kept_terms(out, run, "those of the invite")
    try:
        found = load_newest(out / STATE)
    except DiskError:
        return None
    if found is None or manifest is None:
        return None
    head = Head.from_dict(found.meta["head"])
    if head.run != run:
        raise ManifestMismatch(f"{out / STATE} is of another run ({head.run.hex()[:12]}); choose another --out")
    check_methods(manifest)
    schema = Schema.from_json(str(found.meta["parameters"]))
    return FollowerState(
        manifest, schema, head, found.tensors, int(found.meta["gossip_step"]), tuple(found.meta["ways"])
    )


def keep_state(out: Path, anchor: Anchor, schema: Schema, ways: Sequence[str]) -> None:
    """Replace the state that is kept; for a moment there are two. Raises DiskError.

    ``ways`` lead to others of the run: who wrote the invite may be gone when this follower comes back.
    """
    meta = {"head": anchor.head.to_dict(), "gossip_step": anchor.round, "parameters": schema.to_json()}
    meta["ways"] = list(ways)
    save(out / STATE, f"round-{anchor.round:06d}", anchor.shared, meta, keep=1)


def check_size(known: FollowerState, max_disk: int | None, kept_files: int) -> None:
    """Refuse a model that cannot be held, before a byte of it is asked for: its sizes are a stranger's word.

    ``kept_files``: anchors that are kept beside the state. Raises DeviceError, DiskError.
    """
    outer = make_outer(known.manifest.outer.method, known.manifest.outer.hyper)
    state = Layout.from_schema(known.schema, tuple(outer.init(torch.zeros(1)))).nbytes + _of_senders(known)
    model = 4 * (known.schema.numel + known.schema.buffer_numel)
    memory = psutil.virtual_memory().total
    if 2 * state > memory:  # as it is, and as it comes
        raise DeviceError(
            f"the run's model and outer state take {state / 1e9:.1f} GB twice, this machine has {memory / 1e9:.1f} GB "
            "of memory; follow it on a larger one"
        )
    disk = 3 * state + (kept_files + 1 if kept_files else 0) * model  # one, the next, and what is on its way
    if max_disk is not None and disk > max_disk:
        raise DiskError(
            f"following this run takes up to {disk / 1e9:.2f} GB of disk, {max_disk / 1e9:.2f} GB are allowed; allow "
            "more with --max-disk, or keep fewer anchors"
        )


def _of_senders(known: FollowerState) -> int:
    """Bytes of what receivers keep of the known members; a first snapshot is held against memory by itself."""
    kept = len(parse_feedback(known.manifest.compressor.feedback).receiver)
    return 4 * known.schema.numel * kept * (0 if known.head is None else len(known.head.members))
