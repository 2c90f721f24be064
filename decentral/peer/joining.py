"""join(): hooks the inner optimizer and runs rounds beside the training loop.

    with decentral.join("run.toml", model, optimizer, accelerator=accelerator) as peer:
        while not peer.done:  # the run says when it is over, not the data
            for batch in loader: ...  # your loop, unchanged; break when peer.done

Every H-th ``optimizer.step`` offers a round. With ``overlap = 0`` the step returns once the round is committed (or
passed by); otherwise training goes on and the commit is merged at a later step boundary. The inner optimizer's
state is never touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from decentral.errors import ConfigError
from decentral.manifest import Manifest, preset_manifest
from decentral.manifest.presets import assumed, suited
from decentral.manifest.terms import INNER_OPTIMIZERS
from decentral.optimizers import make_outer
from decentral.peer.invitation import fetch, terms_of
from decentral.peer.peer import Peer
from decentral.peer.settings import JoinOptions, Observer, Settings, check_run, takes_what_is_handed_over
from decentral.quantities import moment_in, rate_of, size_of
from decentral.swarm.admission import check_token
from decentral.swarm.invite import Invite
from decentral.tensors.memory import offload_to
from decentral.training.clocks import Scheduler
from decentral.training.inner import check_covers, make_hookable, trained_by
from decentral.training.inner_optimizers import SPSA
from decentral.training.inner_states import InnerStates, Together
from decentral.training.live_model import LiveModel
from decentral.training.live_side import sparse_sentence
from decentral.training.processes import Accelerator, launched_together
from decentral.transport import Transport
from decentral.transport.throttle import Caps


@takes_what_is_handed_over
def join(
    run: str | Path | Manifest | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    accelerator: Accelerator | None = None,
    preset: str | None = None,
    rounds: int = 100,
    steps: int = 30,
    out: str | Path | None = None,
    listen: Sequence[str] | None = None,
    scheduler: Scheduler | Sequence[Scheduler] | None = None,
    alone: bool = False,
    require_peers: int = 0,
    join_timeout: float | None = None,
    observer: Observer | None = None,
    identity_path: str | Path | None = None,
    checkpoint_every: int = 10,
    tokens_per_step: int = 0,
    max_upload: float | str | None = None,
    max_download: float | str | None = None,
    daily_upload: int | str | None = None,
    transport: Transport | str | None = None,
    relays: Sequence[str] = (),
    lan: bool = True,
    commands: bool = True,
    admit: str | None = None,
    on_nan: Literal["stop", "restart"] = "stop",
    quiet: bool = False,
    keep_serving: bool = False,
    offload: str | Path | None = None,
    evaluate: Callable[[], float | Tensor] | None = None,
    moved: Sequence[str] | None = None,
) -> Peer:
    """Make this process a peer of ``run``: a manifest (its first peer, or a restart in ``out``) or an invite.

    Args:
        run: path of a ``run.toml``, a loaded Manifest, or an invite line. In a script that ``decentral join INVITE
            --script`` runs, that invite, whatever is given here; None: nothing else will do, but for ``preset``.
        model: as it is trained; wrapped by accelerate or not.
        optimizer: the inner optimizer, or a list of all that the loop steps: an inner step is one more step of each.
            ``step`` is hooked, the state never touched.
        accelerator: the ``Accelerator`` that prepared the model, where a peer has several processes: all of them train
            as one. None: this process is the peer.
        preset: found a run by this method, without a file: ``rounds`` of ``steps`` inner steps, with the outer rate and
            the exchange that suit so many and this model, and the rate and decay of this optimizer.
        rounds: of the run that ``preset`` founds; without a preset neither ``rounds`` nor ``steps`` does anything.
        steps: inner steps of one round of it.
        out: run directory; ``decentral-NAME`` when not given, for an invite ``decentral-`` and eight digits of the run.
            A checkpoint of this run found there is resumed.
        listen: multiaddrs; all interfaces, any port, when not given.
        scheduler: one or a list of those that the loop steps once after every inner step; saved and resumed with the
            checkpoint. Of a newcomer to a run that is some rounds on, and of a peer that missed rounds, it is stepped
            to where the run is (rounds by inner steps of a round), and a warning says so. One that is stepped once an
            epoch does not belong here; `Peer.schedule` makes one that goes by the run's rounds.
        alone: train at once. Else the first ``optimizer.step``, where the run has no round yet, waits until it has, or
            had, a second member, and says so every half minute; ``leave()`` or the run's end ends the wait.
        require_peers: wait until this many members are there, in the beginning of the ``with`` block.
        join_timeout: seconds from this call until NoPeersError, when nobody answers or the members are not there.
        observer: called with every event, on whatever thread it happens.
        identity_path: file of this peer's key; ``identity.key`` in ``out`` when not given.
        checkpoint_every: commits, or steps of pairs, between two checkpoints.
        tokens_per_step: training tokens behind one inner step, told to the swarm.
        max_upload: what this peer sends at most, over everything: ``"5mbit"``, ``"600kB/s"``, or bytes per second.
        max_download: what it receives at most.
        daily_upload: what it sends at most per day (UTC), ``"20GB"`` or bytes; then it trains on without contributing.
        relays: multiaddrs of relays, as ``decentral relay`` prints them: who is behind a NAT is reached through them.
        admit: a token that others need, too: it is in this peer's invites, and who has none is refused. For the first
            peer of a run; others have it from their invite, unless that was written without it, and a restart has it
            from its folder.
        commands: let ``decentral status``, ``peers``, ``pause`` and ``leave`` with ``--out`` see and steer this peer.
        lan: announce this peer on its local networks by multicast DNS, and look for others of the run there.
        on_nan: what NaN or Inf in this peer's progress does: ``stop`` raises NonFiniteError, which names the parameter;
            ``restart`` puts the live model back to the anchor, drops inner moments that are not finite, and goes on.
        quiet: print nothing. Else the main process says a change of state and a round on stderr, at most one line a
            second, each beginning with ``decentral:``; printed and not logged, so that no configuration of logging
            doubles or hides them. What goes wrong is logged besides, by ``logging.getLogger("decentral")``.
        transport: ``daemon``, ``native``, ``py-libp2p``, or one of your own; the daemon where this system has it when
            not given.
        keep_serving: after the run's end stay at the end of the block, for those who come late, until ``leave`` or
            Ctrl-C. Without it a folder that holds the run's last commit is ``done`` at once, and asks nobody.
        offload: a folder on a disk: what rounds need beside the model lies in files there, for models that are long
            for this machine's memory (docs/cost.md says how much that is).
        evaluate: a function without arguments that returns the held-out loss of ``model`` as it is then. It is called
            before and after commits, on the training thread: four looks at once, then as often as takes 3 % of the
            time, so let it take no longer than a few inner steps; in evaluation and without gradients, and what it
            draws disturbs nothing. When together falls behind what this peer would have learnt alone, health says so,
            and why; without it ``peer.log(loss=...)`` tells, which is weaker (docs/diagnostics.md). Of a peer of one
            process.
        moved: names of parameters, or of modules around them, that no gradient trains and the loop itself moves:
            ``["teacher"]``; an EMA copy, a target network, a codebook. They go the way of buffers: shared as
            ``buffers`` in ``[model]`` says, kept in checkpoints, brought to newcomers and exported. All peers name the
            same. Not given: modules that no optimizer trains and that begin as a copy of one that is trained, up to
            2**24 values; ``[]``: none.

    Nothing begins before the ``with`` block: it is there that the peer enters the run.

    Raises ConfigError and its kin when the terms cannot work, or trained parameters are in no optimizer; nothing is
    started then. Settings of the optimizer that differ from ``[inner]`` of the manifest are told as a warning.

    """
    given = dict(locals())
    loop = given.pop("run"), given.pop("model"), given.pop("optimizer")
    length = given.pop("preset"), given.pop("rounds"), given.pop("steps")
    if length[0] is not None and (isinstance(loop[0], Manifest) or str(loop[0]).endswith(".toml")):
        raise ConfigError("join(preset=...): it founds a run without other terms; give terms or a preset, not both")
    terms = loop[0] if length[0] is None or loop[0] is not None else founded_by(*length, *loop[1:])
    return Peer(settings_of(terms, *loop[1:], JoinOptions(**given)))


def founded_by(preset: str, rounds: int, steps: int, model: object, optimizer: object) -> Manifest:
    """Terms of a run of ``rounds`` of ``steps`` inner steps, that suit a script's model and its optimizer.

    Raises ConfigError for an unknown preset, or values that cannot be.
    """
    held = _checked(model).parameters()
    numel = sum(parameter.numel() for parameter in held if parameter.requires_grad)
    inner = trained_by(Together.of(optimizer, "optimizer").parts)
    terms = preset_manifest(preset, run={"rounds": rounds}, model={"task": "custom"}, inner={**inner, "steps": steps})
    return suited(preset, terms, rounds, assumed(parameters=numel))


def _checked(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        what = "missing" if model is None else f"a {type(model).__name__}"
        raise ConfigError(f"join: the model is {what}; pass the torch module that the loop trains")
    return model


def settings_of(
    run: str | Path | Manifest | None,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    options: JoinOptions,
) -> Settings:
    """What ``options`` mean for this model and optimizer. Starts nothing, and looks for nobody but to get the terms."""
    check_run(run)
    model = _checked(model)
    check_launched(options.accelerator)
    if options.require_peers < 0:
        raise ConfigError(f"join(require_peers={options.require_peers}): it is a number of peers; 0 waits for none")
    if options.offload is not None:
        offload_to(Path(options.offload))
    caps = Caps(up=rate_of(options.max_upload, "max_upload"), down=rate_of(options.max_download, "max_download"))
    daily_upload, give_up_at = size_of(options.daily_upload, "daily_upload"), moment_in(options.join_timeout)
    how = options.transport if isinstance(options.transport, str) else None
    quiet = options.quiet or os.environ.get("RANK", "0") != "0"  # who is the main process is known with the model only
    admit = _token(options.admit)
    manifest, invite, out = terms_of(
        run, options.out, how, lan=options.lan, join_timeout=options.join_timeout, quiet=quiet, admit=admit
    )
    check_tokens(manifest, options.tokens_per_step)
    optimizers = Together.of(optimizer, "optimizer")
    method = make_outer(manifest.outer.method, manifest.outer.hyper)
    live = LiveModel(
        model,
        manifest.outer.fragments,
        options.accelerator,
        optimizers.parts,
        on_device=method.on_device,
        buffers=manifest.model.buffers or "average",
        moved=[options.moved] if isinstance(options.moved, str) else options.moved,
    )
    check_processes(manifest, live.team.size, optimizers.parts, evaluates=options.evaluate is not None)
    check_covers(optimizers.parts, live.trained)
    for one in optimizers.parts:
        make_hookable(one)
    if method.by_gradients:
        check_gradients(model)
    schedulers = None if options.scheduler is None else Together.of(options.scheduler, "scheduler")
    return Settings(
        options=options,
        manifest=manifest,
        invite=invite,
        model=live,
        optimizers=optimizers,
        states=InnerStates(optimizers, schedulers, live.team.orders),
        out=out.absolute(),  # a script may go elsewhere
        called=out,
        identity_path=(
            out / "identity.key" if options.identity_path is None else Path(options.identity_path)
        ).absolute(),
        give_up_at=give_up_at,
        caps=caps,
        daily_upload=daily_upload,
        admit=admit if invite is None else invite.token,
    )


def check_launched(accelerator: Accelerator | None) -> None:
    """ConfigError for one of several processes that know of no other: each would begin a peer of its own.

    It is the first thing to be looked at: two of them in one folder would hear of the folder alone.
    """
    size, known = launched_together(), 1 if accelerator is None else int(accelerator.num_processes)
    if known > 1 or size < 2:
        return
    why = "pass accelerator=Accelerator(), and" if accelerator is None else "its Accelerator knows of no other:"
    raise ConfigError(
        f"join: WORLD_SIZE is {size}, so this is one of {size} processes that were launched together; {why} on a "
        "machine without a GPU write ACCELERATE_USE_CPU=true before the command; they train as one peer then (to be a "
        "peer each, start them one by one)"
    )


def _token(given: str | None) -> str | None:
    return None if given is None else check_token(given)


def check_gradients(model: nn.Module) -> None:
    """ConfigError for embeddings whose gradients no method can change."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ConfigError(sparse_sentence(f"{name}.weight"))


def check_tokens(manifest: Manifest, tokens_per_step: int) -> None:
    """ConfigError for a peer that would weigh a sixteenth of the others because it does not say what it trains on."""
    if manifest.weighting == "tokens" and tokens_per_step < 1:
        key = 'outer.weighting = "tokens"' if manifest.outer.weighting else f'inner.pace = "{manifest.inner.pace}"'
        raise ConfigError(
            f"join(tokens_per_step={tokens_per_step}): {key}, so a peer without tokens would "
            "count for a sixteenth of the others; pass the training tokens behind one optimizer step"
        )


def check_processes(
    manifest: Manifest, world_size: int, optimizers: Sequence[torch.optim.Optimizer] = (), *, evaluates: bool = False
) -> None:
    """ConfigError for a peer of several processes where each has its own of what they would have to share."""
    if world_size < 2:
        return
    if evaluates:
        raise ConfigError(
            f"join(evaluate=...): the {world_size} processes of this peer would have to evaluate at the same moment; "
            "leave it out, and peer.log(loss=...) tells, or run one process"
        )
    if make_outer(manifest.outer.method, manifest.outer.hyper).inner:
        raise ConfigError(
            f"outer.method {manifest.outer.method} reads or changes the inner optimizer, which each of this peer's "
            f"{world_size} processes has for itself; run one process, or choose another method"
        )
    if INNER_OPTIMIZERS[manifest.inner.named].forward_only or any(isinstance(one, SPSA) for one in optimizers):
        raise ConfigError(
            f"spsa draws directions of its own in each of this peer's {world_size} processes, and their parameters "
            "would part; run one process, or choose another inner optimizer"
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
    """The manifest of the run that ``invite`` names: the one in ``out``, else from any of its peers. Writes nothing.

    Looks until a peer answers, or ``join_timeout`` seconds; with ``lan`` on the local network, too. ``transport`` is
    ``daemon``, ``native`` or ``py-libp2p``; None: the daemon where this system has it. Raises NoPeersError,
    InviteError, ManifestMismatch.
    """
    return fetch(Invite.parse(invite), Path(out), listen, join_timeout, transport, lan=lan)
