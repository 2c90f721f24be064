"""join(): hooks the inner optimizer and runs rounds beside the training loop.

    with decentral.join("run.toml", model, optimizer, accelerator=accelerator) as peer:
        for batch in loader: ...  # your loop, unchanged; stop when peer.done

Every H-th ``optimizer.step`` offers a round. With ``overlap = 0`` the step returns once the round is committed (or
passed by); otherwise training goes on and the commit is merged at a later step boundary. The inner optimizer's
state is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from decentral.errors import ConfigError
from decentral.manifest import Manifest
from decentral.peer.inner_optimizers import Together, check_covers
from decentral.peer.invitation import fetch, terms_of
from decentral.peer.live_model import LiveModel
from decentral.peer.peer import Peer
from decentral.peer.settings import Observer, Settings
from decentral.swarm.invite import Invite
from decentral.transport import Transport
from decentral.transport.throttle import Caps


def join(
    run: str | Path | Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    accelerator: Any | None = None,  # Any: accelerate is untyped
    out: str | Path | None = None,
    listen: Sequence[str] | None = None,
    scheduler: Any | None = None,  # one or a list. Any: torch's schedulers share no public base with state_dict
    require_peers: int = 0,
    join_timeout: float | None = None,
    observer: Observer | None = None,
    identity_path: str | Path | None = None,
    checkpoint_every: int = 10,
    tokens_per_step: int = 0,
    max_upload: float | None = None,
    max_download: float | None = None,
    daily_upload: int | None = None,
    transport: Transport | str | None = None,
    relays: Sequence[str] = (),
    lan: bool = True,
    commands: bool = True,
    on_nan: Literal["stop", "restart"] = "stop",
) -> Peer:
    """Make this process a peer of ``run``: a manifest (its first peer, or a restart in ``out``) or an invite.

    Args:
        run: path of a ``run.toml``, a loaded Manifest, or an invite line.
        model: as it is trained; wrapped by accelerate or not.
        optimizer: the inner optimizer, or a list of all that the loop steps: an inner step is one more step of each.
            ``step`` is hooked, the state never touched.
        out: run directory; ``decentral-NAME`` when not given, for an invite ``decentral-`` and eight digits of the run.
            A checkpoint of this run found there is resumed.
        listen: multiaddrs; all interfaces, any port, when not given.
        scheduler: one or a list; saved and resumed with the checkpoint.
        require_peers: wait until this many members are there; NoPeersError after ``join_timeout`` seconds.
        observer: called with every event, on whatever thread it happens.
        checkpoint_every: commits between two checkpoints.
        tokens_per_step: training tokens behind one inner step, told to the swarm.
        max_upload: bytes per second that this peer sends at most, over everything; ``max_download`` that it receives.
        daily_upload: bytes that it sends at most per day (UTC); then it trains on without contributing.
        relays: multiaddrs of relays, as ``decentral relay`` prints them: who is behind a NAT is reached through them.
        commands: let ``decentral status``, ``peers``, ``pause`` and ``leave`` with ``--out`` see and steer this peer.
        lan: announce this peer on its local networks by multicast DNS, and look for others of the run there.
        on_nan: what NaN or Inf in this peer's progress does: ``stop`` raises NonFiniteError, which names the parameter;
            ``restart`` puts the live model back to the anchor, drops inner moments that are not finite, and goes on.
        transport: ``daemon``, ``native``, ``py-libp2p``, or one of your own; the daemon where this system
            has it when not given.

    Raises ConfigError and its kin when the terms cannot work, or trained parameters are in no optimizer; nothing is
    started then. Settings of the optimizer that differ from ``[inner]`` of the manifest are told as a warning.

    """
    if on_nan not in ("stop", "restart"):
        raise ConfigError(f'join(on_nan={on_nan!r}): "stop" and "restart" are known')
    manifest, invite, out_path = terms_of(run, out, transport if isinstance(transport, str) else None, lan=lan)
    check_tokens(manifest, tokens_per_step)
    live = LiveModel(model, manifest.outer.fragments, accelerator)
    optimizers = Together.of(optimizer, "optimizer")
    check_covers(optimizers.parts, live.trained)
    settings = Settings(
        manifest=manifest,
        invite=invite,
        model=live,
        optimizers=optimizers,
        schedulers=None if scheduler is None else Together.of(scheduler, "scheduler"),
        out=out_path,
        listen=listen,
        require_peers=require_peers,
        join_timeout=join_timeout,
        observer=observer,
        identity_path=Path(identity_path) if identity_path is not None else out_path / "identity.key",
        checkpoint_every=checkpoint_every,
        tokens_per_step=tokens_per_step,
        caps=Caps(up=max_upload, down=max_download),
        daily_upload=daily_upload,
        transport=transport,
        relays=tuple(relays),
        lan=lan,
        commands=commands,
        on_nan=on_nan,
    )
    return Peer(settings)


def check_tokens(manifest: Manifest, tokens_per_step: int) -> None:
    """ConfigError for a peer that would weigh a sixteenth of the others because it does not say what it trains on."""
    if manifest.outer.weighting == "tokens" and tokens_per_step < 1:
        raise ConfigError(
            f'join(tokens_per_step={tokens_per_step}): outer.weighting = "tokens", so a peer without tokens would '
            "count for a sixteenth of the others; pass the training tokens behind one optimizer step"
        )


def fetch_manifest(
    invite: str,
    out: str | Path,
    *,
    listen: Sequence[str] | None = None,
    join_timeout: float | None = None,
    transport: str | None = None,
    lan: bool = True,
) -> Manifest:
    """The manifest of the run that ``invite`` names, from any of its peers; kept as ``run.toml`` in ``out``.

    Looks until a peer answers, or ``join_timeout`` seconds; with ``lan`` on the local network, too. ``transport`` is
    ``daemon``, ``native`` or ``py-libp2p``; None: the daemon where this system has it. Raises NoPeersError,
    InviteError, ManifestMismatch.
    """
    return fetch(Invite.parse(invite), Path(out), listen, join_timeout, transport, lan=lan)
