"""A whole peer, or one that shares a replica of three stages: it trains until it is killed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import mse_loss

from decentral.manifest import load_manifest
from decentral.peer import join
from decentral.training.part import Needs

LAYER = 42  # parameters


def main(out: str, where: str, *, shares: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(int(shares))
    given = {"share": True, "memory": Needs().in_files([LAYER] * 3, range(1))} if shares else {}
    net = {"listen": ("/ip4/127.0.0.1/tcp/0",), "lan": False, "alone": True, "transport": "native"}
    run = load_manifest(where) if where.endswith(".toml") else where
    with join(run, model, optimizer, out=out, **net, **given) as peer:
        sys.stdout.write(json.dumps({"event": "began", "invite": peer.invite}) + "\n")
        sys.stdout.flush()
        while not peer.done:
            inputs = torch.randn(12, 6, generator=data)
            if peer.gradients(inputs, torch.sin(inputs), mse_loss) is not None:
                optimizer.step()
            optimizer.zero_grad()


def run(arguments: Sequence[str]) -> None:
    """``FOLDER MANIFEST|INVITE whole|share``."""
    out, where, kind = arguments
    main(out, where, shares=kind == "share")
