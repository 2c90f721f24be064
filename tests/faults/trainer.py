"""A lone peer that trains until it is killed; says every commit and where it stood when it began."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from decentral.manifest import preset_manifest
from decentral.peer import join


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main(out: str, preset: str, last: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manifest = preset_manifest(
        preset, run={"rounds": 100_000, "salt": "resume"}, inner={"steps": 3}, outer={"fragments": 1, "overlap": 0}
    )
    data = torch.Generator().manual_seed(1)
    listen = ("/ip4/127.0.0.1/tcp/0",)
    with join(manifest, model, optimizer, out=out, listen=listen, checkpoint_every=4, alone=True) as peer:
        say(event="began", round=peer.round, digest=peer.anchor_digest, steps=peer.inner_steps)
        while peer.round < last:
            before = peer.round
            model(torch.randn(8, 64, generator=data)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if peer.round > before:
                say(event="commit", round=peer.round, digest=peer.anchor_digest, steps=peer.inner_steps)


def run(arguments: Sequence[str]) -> None:
    """``FOLDER PRESET LAST_ROUND``."""
    out, preset, last = arguments
    main(out, preset, int(last))
