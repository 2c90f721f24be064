"""join(): hooks the inner optimizer and runs rounds beside the training loop.

    with decentral.join("run.toml", model, optimizer, accelerator=accelerator) as peer:
        while not peer.done:  # the run says when it is over, not the data
            for batch in loader: ...  # your loop, unchanged; break when peer.done

Every H-th ``optimizer.step`` offers a round. With ``overlap = 0`` the step returns once the round is committed (or
passed by); otherwise training goes on and the commit is merged at a later step boundary. The inner optimizer's
state is never touched.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Unpack

import anyio
import torch
from torch import nn

from decentral.dissemination.text import TextFetch
from decentral.errors import ConfigError, InviteError, NoPeersError, PayloadError, TransportError
from decentral.manifest import Manifest, check_methods, load_manifest, preset_manifest
from decentral.manifest.presets import default_scale, suit
from decentral.manifest.terms import INNER_OPTIMIZERS, SharedText
from decentral.node.folder import read_terms, terms_here
from decentral.node.node import RETRY, throttle
from decentral.observe.events import printable
from decentral.observe.screen import HINT_SECONDS, hint_after, say
from decentral.optimizers import make_outer
from decentral.peer.network_setup import run_apart
from decentral.peer.peer import Peer
from decentral.peer.settings import JoinOptions, Settings, complete, takes_options
from decentral.pipeline.cut import MOST_FRAGMENTS
from decentral.pipeline.stage import segments_of
from decentral.quantities import moment_in, rate_of, size_of, time_left
from decentral.swarm.admission import Admission, check_token
from decentral.swarm.directory import Directory
from decentral.swarm.hello import Hello, ask_hello
from decentral.swarm.identity import Identity
from decentral.swarm.invite import Invite, whole_invite
from decentral.swarm.lan import Lan
from decentral.tensors.memory import offload_to
from decentral.training.inner import check_covers, make_hookable, read_inner_settings
from decentral.training.inner_optimizers import SPSA
from decentral.training.inner_states import InnerStates, Together
from decentral.training.live_model import LiveModel
from decentral.training.live_side import sparse_sentence
from decentral.training.part import choose_part
from decentral.training.processes import Accelerator, count_launched
from decentral.transport import Transport
from decentral.transport.choice import make_transport
from decentral.transport.throttle import Caps
from decentral.wire.keys import PeerId

logger = logging.getLogger("decentral.peer")


@takes_options
def join(
    run: str | Path | Manifest | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    **options: Unpack[JoinOptions],
) -> Peer:
    """Make this process a peer of ``run``: a manifest (its first peer, or a restart in ``out``) or an invite.

    Args:
        run: path of a ``run.toml``, a loaded Manifest, or an invite line. In a script that ``decentral join INVITE
            --script`` runs, that invite, whatever is given here; None: nothing else will do, but for ``preset``.
        model: as it is trained; wrapped by accelerate or not.
        optimizer: the inner optimizer, or a list of all that the loop steps: an inner step is one more step of each.
            ``step`` is hooked, the state never touched.
        options: each is declared in `decentral.peer.settings.JoinOptions`, with its default, unit and meaning.

    Nothing begins before the ``with`` block: it is there that the peer enters the run.

    Raises ConfigError and its kin when the terms cannot work, or trained parameters are in no optimizer; nothing is
    started then. Settings of the optimizer that differ from ``[inner]`` of the manifest are told as a warning.

    """
    asked = complete(options)
    if (preset := asked["preset"]) is not None:
        if isinstance(run, Manifest) or str(run).endswith(".toml"):
            raise ConfigError("join(preset=...): it founds a run without other terms; give terms or a preset, not both")
        run = founding_terms(preset, asked["rounds"], asked["steps"], model, optimizer) if run is None else run
    return Peer(settings_of(run, model, optimizer, asked))


def founding_terms(preset: str, rounds: int, steps: int, model: object, optimizer: object) -> Manifest:
    """Terms of a run of ``rounds`` of ``steps`` inner steps, that suit a script's model and its optimizer.

    Raises ConfigError for an unknown preset, or values that cannot be.
    """
    held = _module(model).parameters()
    numel = sum(parameter.numel() for parameter in held if parameter.requires_grad)
    inner = read_inner_settings(Together.of(optimizer, "optimizer").parts)
    terms = preset_manifest(preset, run={"rounds": rounds}, model={"task": "custom"}, inner={**inner, "steps": steps})
    return suit(preset, terms, rounds, default_scale(parameters=numel))


def _module(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        what = "missing" if model is None else f"a {type(model).__name__}"
        raise ConfigError(f"join: the model is {what}; pass the torch module that the loop trains")
    return model


def check_run(run: object) -> None:
    """Raise ConfigError for what names no run."""
    if run is not None and not isinstance(run, str | PathLike | Manifest):
        raise ConfigError(
            f"join: the run is a {type(run).__name__}; pass the path of a run.toml, a Manifest or an invite line "
            "first: join(run, model, optimizer)"
        )


def settings_of(
    run: str | Path | Manifest | None,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    options: JoinOptions,
) -> Settings:
    """Return what ``options`` mean for this model and optimizer. Starts nothing, and asks nobody but for the terms."""
    check_run(run)
    model = _module(model)
    check_launched(options["accelerator"])
    if options["offload"] is not None:
        offload_to(Path(options["offload"]))
    caps = Caps(up=rate_of(options["max_upload"], "max_upload"), down=rate_of(options["max_download"], "max_download"))
    daily_upload, give_up_at = size_of(options["daily_upload"], "daily_upload"), moment_in(options["join_timeout"])
    how = transport if isinstance(transport := options["transport"], str) else None
    quiet = (
        options["quiet"] or os.environ.get("RANK", "0") != "0"
    )  # who is the main process is known with the model only
    admit = _token(options["admit"])
    manifest, invite, out = terms_of(
        run, options["out"], how, lan=options["lan"], join_timeout=options["join_timeout"], quiet=quiet, admit=admit
    )
    check_tokens(manifest, options["tokens_per_step"])
    optimizers = Together.of(optimizer, "optimizer")
    method = make_outer(manifest.outer.method, manifest.outer.hyper)
    live = LiveModel(
        model,
        manifest.outer.fragments,
        options["accelerator"],
        optimizers.parts,
        layout=manifest.outer.fragment_layout,
        on_device=method.on_device,
        buffers=manifest.model.buffers or "average",
        moved=[options["moved"]] if isinstance(options["moved"], str) else options["moved"],
    )
    check_processes(manifest, live.team.size, optimizers.parts, evaluates=options["evaluate"] is not None)
    memory = size_of(options["memory"], "memory")
    if options["share"] or (
        memory is not None and len(choose_part(live.schema.sizes, memory)) < manifest.outer.fragments
    ):
        check_part(manifest, live, optimizers.parts, "share" if options["share"] else "memory")
    check_covers(optimizers.parts, live.trained)
    for one in optimizers.parts:
        make_hookable(one)
    if method.by_gradients:
        check_gradients(model)
    schedulers = None if options["scheduler"] is None else Together.of(options["scheduler"], "scheduler")
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
            out / "identity.key" if options["identity_path"] is None else Path(options["identity_path"])
        ).absolute(),
        give_up_at=give_up_at,
        caps=caps,
        daily_upload=daily_upload,
        max_writes=size_of(options["max_writes"], "max_writes"),
        memory=memory,
        admit=admit if invite is None else invite.token,
    )


def check_launched(accelerator: Accelerator | None) -> None:
    """ConfigError for one of several processes that know of no other: each would begin a peer of its own.

    It is the first thing to be looked at: two of them in one folder would hear of the folder alone.
    """
    size, known = count_launched(), 1 if accelerator is None else int(accelerator.num_processes)
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
    if INNER_OPTIMIZERS[manifest.inner.optimizer_name].forward_only or any(isinstance(one, SPSA) for one in optimizers):
        raise ConfigError(
            f"spsa draws directions of its own in each of this peer's {world_size} processes, and their parameters "
            "would part; run one process, or choose another inner optimizer"
        )


def check_part(
    manifest: Manifest, live: LiveModel, optimizers: Sequence[torch.optim.Optimizer], option: str = "memory"
) -> None:
    """ConfigError where a peer that trains some fragments alone, for want of memory or as a stage, by the ``option``,
    would not do what the others take it to do.
    """
    method = make_outer(manifest.outer.method, manifest.outer.hyper)
    if method.topology != "all" or method.inner or method.draws:
        raise ConfigError(
            f"join({option}=...): outer.method {manifest.outer.method} needs peers that train all of the model; leave "
            f"{option} out, or join a run of diloco or sparseloco"
        )
    if INNER_OPTIMIZERS[manifest.inner.optimizer_name].forward_only or any(isinstance(one, SPSA) for one in optimizers):
        raise ConfigError(
            f"join({option}=...): spsa moves every parameter to and fro, and must train all of the model; leave "
            f"{option} out"
        )
    if live.team.size > 1 or any(live.averages.swaps(one) for one in optimizers):
        what = f"{live.team.size} processes" if live.team.size > 1 else "an optimizer that trains at averages"
        raise ConfigError(
            f"join({option}=...): this peer has {what}, and must train all of the model; leave {option} out"
        )
    if option == "share" and (manifest.outer.fragment_layout != "stages" or manifest.outer.fragments < 2):
        raise ConfigError(
            "join(share=True): the run's fragments are no stages; found one with decentral init --stages 4, or join "
            "without share"
        )
    if option == "share" and manifest.outer.fragments > MOST_FRAGMENTS:
        raise ConfigError(
            f"join(share=True): {manifest.outer.fragments} fragments, of which there are too many cuts to try; join a "
            f"run of {MOST_FRAGMENTS} at most"
        )
    if option == "share":
        segments_of(live.bare, live.schema.fragments)


# ---- the terms of a run ----
#
# From a manifest, its file, or an invite and the first peer that answers: what a newcomer must have before it can build
# the model.

NOBODY = (
    "nobody has answered yet, still searching: is the run over, or no peer of it up? Try a fresh invite, "
    "decentral doctor INVITE, or {} to give up by itself"
)


def terms_of(
    run: str | Path | Manifest | None,
    out: str | Path | None,
    transport: str | None,
    *,
    lan: bool = True,
    join_timeout: float | None = None,
    quiet: bool = True,
    admit: str | None = None,
) -> tuple[Manifest, Invite | None, Path]:
    """Return terms, invite and folder that ``run`` means: a manifest, its file, or an invite, whose terms are fetched.

    ``quiet``: say nothing while nobody has answered. ``admit``: the token of an invite that has none.
    """
    if run is None:
        raise ConfigError(
            "join(None): no run was handed over to this process; start the script with decentral join INVITE --script, "
            "or give join() a manifest or an invite"
        )
    if isinstance(run, Manifest):
        folder = _out(out, run)
        return terms_here(folder, run), None, folder
    if isinstance(run, Path) or run.endswith(".toml"):
        if not Path(run).exists():
            line = f"decentral init {shlex.quote(str(run))} --task custom"
            raise ConfigError(f"join: {run}: no such manifest; write one with: {line}, or give join(preset=...)")
        manifest = load_manifest(Path(run))
        return manifest, None, _out(out, manifest)
    invite = Invite.parse(run)
    folder = Path(out) if out is not None else Path(f"decentral-{invite.run.hex()[:8]}")
    invite = Invite.parse(whole_invite(run, folder, admit))
    quiet = quiet or read_terms(folder, invite.run, "those of the invite") is not None
    with nullcontext() if quiet else _say_search():
        return fetch(invite, folder, None, join_timeout, transport, lan=lan), invite, folder


@contextmanager
def _say_search() -> Iterator[None]:
    """Say that peers are looked for: a script that waits for others looks like one that hangs."""
    say("decentral: looking for the run's peers ...")
    with hint_after(HINT_SECONDS, "decentral: " + NOBODY.format("join(join_timeout=S)")):
        yield


def _out(out: str | Path | None, manifest: Manifest) -> Path:
    return Path(out) if out is not None else Path(f"decentral-{manifest.run.name}")


def fetch(
    invite: Invite,
    out: Path,
    listen: Sequence[str] | None,
    join_timeout: float | None,
    transport: str | None = None,
    *,
    lan: bool = True,
) -> Manifest:
    """Return the manifest, from ``out`` where a peer of the run was there before, else from a peer of the invite."""
    return ask_terms(invite, out, listen, join_timeout, transport, lan=lan)[0]


def ask_terms(
    invite: Invite,
    out: Path,
    listen: Sequence[str] | None,
    join_timeout: float | None,
    transport: str | None = None,
    *,
    lan: bool = True,
) -> tuple[Manifest, bool]:
    """Return the same, and whether the run is over, as the peer that answered says; False where nobody was asked."""
    kept = read_terms(out, invite.run, "those of the invite")
    if kept is not None:
        return kept, False
    hello = ask_first_peer(invite, listen, join_timeout, transport, lan=lan)
    return hello.manifest, hello.over


def ask_first_peer(
    invite: Invite,
    listen: Sequence[str] | None,
    join_timeout: float | None,
    transport: str | None = None,
    *,
    lan: bool = True,
) -> Hello:
    """Return the answer of the first peer of the run that the invite leads to; this program knows the run's methods.

    Raises NoPeersError after ``join_timeout`` seconds, InviteError, NotAdmitted, VersionError, ConfigError.
    """
    if not invite.addresses:
        raise InviteError("invite: it names the run and nobody who is in it; ask for a fresh one: decentral status")
    hello = run_apart(_fetch, invite, listen, join_timeout, transport, lan)
    check_methods(hello.manifest)
    return hello


async def _fetch(
    invite: Invite, listen: Sequence[str] | None, join_timeout: float | None, asked: str | None, lan: bool
) -> Hello:
    async with _at_the_door(invite, listen, asked, lan=lan) as (transport, directory, admission):
        with anyio.move_on_after(join_timeout):
            return await _first_answer(invite, transport, directory, admission)
        raise _nobody(invite)


@asynccontextmanager
async def _at_the_door(
    invite: Invite, listen: Sequence[str] | None, asked: str | None, *, lan: bool, caps: Caps | None = None
) -> AsyncIterator[tuple[Transport, Directory, Admission | None]]:
    """Meet the peers of a run as somebody who only asks, and has a name for that; with ``caps`` for more than terms,
    which those who admit by token give to who proves to know it.
    """
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="decentral-"))  # the daemon reads the key there
        identity = Identity.load_or_create(Path(folder) / "identity.key")
        transport: Transport = make_transport(asked, identity, listen)
        admission = Admission(invite.token, invite.run, identity.peer) if invite.token is not None else None
        transport = transport if caps is None else throttle(transport, caps, None, admission)
        # Without the DHT: it answers only once a peer has, and hivemind's import then holds up the end of a script that
        # leaves meanwhile, as this loop's workers are no daemons.
        directory = Directory(transport, identity.signer, invite.run, ttl=15.0, dht=False)
        directory.prefer(())  # whoever the invite leads to may name whom it likes
        await stack.enter_async_context(transport)
        group = await stack.enter_async_context(anyio.create_task_group())
        group.start_soon(directory.run)
        directory.add_bootstrap(invite.addresses)
        if lan:
            group.start_soon(Lan(_log, announce=False).run, directory)
        try:
            yield transport, directory, admission
        finally:
            await directory.goodbye()  # or its address, which only asked, would stand in the others' invites
            group.cancel_scope.cancel()  # or the directory would look on, and this wait for it for ever


def _nobody(invite: Invite) -> NoPeersError:
    return NoPeersError(
        f"no peer of run {invite.run.hex()[:12]} answered in time; ask whoever invited you for a fresh invite: it is "
        "in decentral status of every peer that is up"
    )


def _log(event: str, fields: dict[str, object]) -> None:
    logger.debug("%s: %s", event, fields)


_MOST_SAID = 300  # characters of what is wrong with an answer: a part of it is the stranger's


async def _first_answer(
    invite: Invite, transport: Transport, directory: Directory, admission: Admission | None
) -> Hello:
    has_warned = False
    while True:
        for peer in list(directory.live()):
            try:
                hello = await ask_hello(transport, peer, admission)
            except TransportError:
                continue
            except PayloadError as error:  # of a stranger, perhaps: others may answer well
                if not has_warned:
                    what = printable(str(error))[:_MOST_SAID]
                    logger.warning("a peer answered with what this version cannot read, maybe of a newer one: %s", what)
                has_warned = True
                continue
            if hello.manifest.digest == invite.run:
                return hello
        await anyio.sleep(RETRY)


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


# ---- the text of a run ----
#
# Where its terms let it travel, it comes from those who have it before anything is built, and is kept in the folder.


def fetch_text(
    invite: Invite,
    shared: SharedText,
    path: Path,
    asked: JoinOptions,
    *,
    told: Callable[[int, int], None],
    dropped: Callable[[PeerId, str], None],
) -> None:
    """Fetch the text into ``path`` from the peers that the invite leads to, as `TextFetch` does.

    ``asked`` says how they are reached, how fast, and how long to look for one while nobody gives anything. Raises
    NoPeersError and DiskError; what came is kept.
    """
    run_apart(_fetch_text, invite, shared, path, asked, told, dropped)


async def _fetch_text(
    invite: Invite,
    shared: SharedText,
    path: Path,
    asked: JoinOptions,
    told: Callable[[int, int], None],
    dropped: Callable[[PeerId, str], None],
) -> None:
    caps = Caps(up=rate_of(asked["max_upload"], "max_upload"), down=rate_of(asked["max_download"], "max_download"))
    patience, here = moment_in(asked["join_timeout"]), 0
    way = asked["transport"] if isinstance(asked["transport"], str) else None
    async with _at_the_door(invite, asked["listen"], way, lan=asked["lan"], caps=caps) as (transport, directory, _):
        fetch = TextFetch(transport, shared, path, told=told, dropped=dropped)
        while True:
            with suppress(TransportError):
                await fetch.run(lambda: list(directory.live()))
                return
            if fetch.here > here:
                patience, here = moment_in(asked["join_timeout"]), fetch.here
            elif time_left(patience) == 0:
                raise _nobody(invite)
            await anyio.sleep(RETRY)
