"""From an invite to the manifest it names: the one thing a newcomer must have before it can build the model."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio

from decentral.errors import ConfigError, InviteError, NoPeersError, PayloadError, TransportError
from decentral.manifest import Manifest, check_methods, load_manifest
from decentral.node.folder import kept_terms, terms_here
from decentral.node.node import RETRY
from decentral.observe.screen import HINT_SECONDS, hint_after, say
from decentral.peer.network_setup import run_apart
from decentral.swarm.admission import Admission
from decentral.swarm.directory import Directory
from decentral.swarm.hello import Hello, ask_hello
from decentral.swarm.identity import Identity
from decentral.swarm.invite import Invite, whole_invite
from decentral.swarm.lan import Lan
from decentral.transport import Transport
from decentral.transport.choice import make_transport

NOBODY = (
    "nobody has answered yet, still searching: is the run over, or no peer of it up? Try a fresh invite, "
    "decentral doctor INVITE, or {} to give up by itself"
)

logger = logging.getLogger("decentral.peer")


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
    """What ``run`` means: a manifest object, a manifest file, or an invite whose manifest is fetched first.

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
    quiet = quiet or kept_terms(folder, invite.run, "those of the invite") is not None
    with nullcontext() if quiet else _said():
        return fetch(invite, folder, None, join_timeout, transport, lan=lan), invite, folder


@contextmanager
def _said() -> Iterator[None]:
    """A script that waits for others looks like one that hangs."""
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
    """The manifest, from ``out`` when a peer of the run was there before, else from any peer the invite leads to."""
    return asked(invite, out, listen, join_timeout, transport, lan=lan)[0]


def asked(
    invite: Invite,
    out: Path,
    listen: Sequence[str] | None,
    join_timeout: float | None,
    transport: str | None = None,
    *,
    lan: bool = True,
) -> tuple[Manifest, bool]:
    """The same, and whether the run is over by the word of who answered; False where nobody was asked."""
    kept = kept_terms(out, invite.run, "those of the invite")
    if kept is not None:
        return kept, False
    hello = greeted(invite, listen, join_timeout, transport, lan=lan)
    return hello.manifest, hello.over


def greeted(
    invite: Invite,
    listen: Sequence[str] | None,
    join_timeout: float | None,
    transport: str | None = None,
    *,
    lan: bool = True,
) -> Hello:
    """What the first peer of the run that the invite leads to says of it; this program knows its methods.

    Raises NoPeersError after ``join_timeout`` seconds, InviteError, NotAdmitted, VersionError, ConfigError.
    """
    if not invite.addresses:
        raise InviteError("invite: it names the run and nobody who is in it; ask for a fresh one: decentral status")
    with TemporaryDirectory(prefix="decentral-") as folder:  # who only asks has a name for that
        hello = run_apart(_fetch, invite, Path(folder), listen, join_timeout, transport, lan)
    check_methods(hello.manifest)
    return hello


async def _fetch(
    invite: Invite,
    folder: Path,
    listen: Sequence[str] | None,
    join_timeout: float | None,
    asked: str | None,
    lan: bool,
) -> Hello:
    identity = Identity.load_or_create(folder / "identity.key")
    transport = make_transport(asked, identity, listen)
    admission = Admission(invite.token, invite.run, identity.peer) if invite.token is not None else None
    # Without the DHT: it answers only once a peer has, and hivemind's import then holds up the end of a script that
    # leaves meanwhile, as this loop's workers are no daemons.
    directory = Directory(transport, identity.signer, invite.run, ttl=15.0, dht=False)
    directory.prefer(())  # whoever the invite leads to may name whom it likes
    async with transport, anyio.create_task_group() as group:
        group.start_soon(directory.run)
        directory.add_bootstrap(invite.addresses)
        if lan:
            group.start_soon(Lan(_log, announce=False).run, directory)
        hello, refused = None, None
        try:
            with anyio.move_on_after(join_timeout):
                hello = await _first_answer(invite, transport, directory, admission)
        except ConfigError as error:
            refused = error
        await directory.goodbye()  # or its address, which only asked, would stand in the others' invites
        group.cancel_scope.cancel()  # or the directory would look on, and this wait for it for ever
    if refused is not None:
        raise refused
    if hello is not None:
        return hello
    raise NoPeersError(
        f"no peer of run {invite.run.hex()[:12]} answered in time; ask whoever invited you for a fresh invite: it is "
        "in decentral status of every peer that is up"
    )


def _log(event: str, fields: dict[str, object]) -> None:
    logger.debug("%s: %s", event, fields)


async def _first_answer(
    invite: Invite, transport: Transport, directory: Directory, admission: Admission | None
) -> Hello:
    while True:
        for peer in list(directory.live()):
            try:
                hello = await ask_hello(transport, peer, admission)
            except (TransportError, PayloadError):
                continue
            if hello.manifest.digest == invite.run:
                return hello
        await anyio.sleep(RETRY)
