"""follow(): receives the anchors of a run and contributes nothing, for evaluation, serving and RL rollouts.

    with decentral.follow("decentral1:...", every=5) as anchors:
        for anchor in anchors:  # ends with the run
            model.load_state_dict(anchor.state_dict(), strict=False)

``anchors.latest()`` has the newest one at once, for a loop that does something else meanwhile.

Needs no data, no script and no model: the shapes come from the run's peers. Whoever is slow gets the newest anchor and
misses those before it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio

from decentral.consensus.chain import Head
from decentral.errors import NoPeersError, PayloadError, UsageError
from decentral.manifest import Manifest
from decentral.node.folder import keep_terms, keep_token, occupy, read_terms
from decentral.node.follower import Anchor, Follower, FollowerState, check_size, keep_state, read_state
from decentral.node.node import Start, throttle
from decentral.observe.contributions import RoundMetrics
from decentral.observe.events import EventLog
from decentral.observe.status import check_free
from decentral.peer.joining import ask_first_peer
from decentral.peer.network_setup import NetworkSetup, RelayWatch, check_relays, enter
from decentral.peer.settings import check_value
from decentral.quantities import moment_in, rate_of, size_of, time_left
from decentral.swarm.admission import Admission
from decentral.swarm.directory import Directory, invite_line, ways_to_others
from decentral.swarm.identity import Identity
from decentral.swarm.invite import Invite, whole_invite
from decentral.swarm.lan import Lan
from decentral.tensors.memory import fresh_zeros
from decentral.training.swarm_side import SwarmThread
from decentral.transport import Traffic, Transport
from decentral.transport.memory import MemoryNetwork
from decentral.transport.throttle import Caps

SAVE_EVERY = 60.0  # s between two states, which hold the outer optimizer's, too: what a kill costs to fetch again
_LOOK_EVERY = 0.2  # s between looks whether the swarm's side still runs


class Following:
    """The anchors of one run, while the ``with`` block lasts. An iterator of `Anchor`; ends after the last one."""

    def __init__(self, settings: FollowSettings) -> None:
        self.out, self._settings, self._invite = settings.out, settings, settings.invite
        self._news = threading.Condition()
        self._newest: Anchor | None = None  # not yet given away
        self._last: Anchor | None = None  # given away
        self._leaving = threading.Event()
        self._saved_at, self._saved = float("-inf"), b""
        self._relays = RelayWatch()

    def __enter__(self) -> Self:
        asked = self._settings
        read_terms(self.out, self._invite.run, "those of the invite")
        if (self.out / "acceptor").exists() or (self.out / "checkpoints").exists():
            raise UsageError(f"{self.out}: the folder of a peer that trains; choose another --out for a follower")
        check_free(self.out, own=os.getpid())
        self._known = known_of(asked)
        check_size(self._known, asked.max_disk, asked.kept_files)
        with ExitStack() as stack:
            stack.enter_context(occupy(self.out))
            keep_terms(self.out, self._known.manifest)
            if self._invite.token is not None:
                keep_token(self.out, self._invite.token)
            startup = FollowerStartup(asked, self._known)
            self._offline = startup.offline
            self._events = EventLog(self.out)
            stack.callback(self._events.close)
            network = startup.enter()
            self._relays = network.watch
            self._swarm = startup.swarm(network, self._events, self._on_anchor)
            stack.callback(self._end)
            self._swarm.start()
            self._entered = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.close()

    def __iter__(self) -> Iterator[Anchor]:
        return self

    def __next__(self) -> Anchor:
        """The newest anchor that is due, once there is one. Raises what ended the swarm's side; NoPeersError."""
        while not self._leaving.is_set() and not (self._last is not None and self._last.final):
            with self._news:
                self._news.wait_for(lambda: self._newest is not None, _LOOK_EVERY)
                found, self._newest = self._newest, None
            if found is not None:
                self._last = found
                self._save(found, least=SAVE_EVERY)
                return found
            self._check_alive()
        raise StopIteration

    def latest(self) -> Anchor | None:
        """The newest anchor that is due, without waiting for it: None before the first, the same one until there is a
        newer one, and when the run is over the last. Raises what ended the swarm's side; NoPeersError.

        What it gave counts as given: a loop over the anchors goes on with the next one.
        """
        with self._news:
            found, self._newest = self._newest, None
        if found is not None:
            self._last = found
            self._save(found, least=SAVE_EVERY)
        elif not self._leaving.is_set() and not (self._last is not None and self._last.final):
            self._check_alive()
        return self._last

    @property
    def manifest(self) -> Manifest:
        """The terms of the run."""
        return self._known.manifest

    @property
    def num_frozen(self) -> int:
        """Parameters that are not trained: no anchor holds them."""
        return len(self._known.schema.frozen)

    @property
    def peer(self) -> bytes:
        """This follower's name, as bytes."""
        return self._swarm.node.driver.state.me

    @property
    def head(self) -> Head:
        """Where the run's chain stands, as far as is known here."""
        return self._swarm.node.driver.head

    @property
    def traffic(self) -> Traffic:
        """The bytes that it exchanged, in all and with each peer."""
        return self._swarm.node.transport.traffic

    @property
    def live(self) -> frozenset[bytes]:
        """The peers that are heard of; none once its swarm side has ended."""
        if self._swarm.alive:
            with suppress(RuntimeError, CancelledError):  # the loop ended between the question and the answer
                return self._swarm.call(_ask_live, self._swarm.node)
        return frozenset()

    @property
    def invite(self) -> str:
        """A line that lets others join by way of this follower; empty while nobody could reach it."""
        return "" if self._offline else invite_line(self._swarm.node.directory, self._invite.run, self._invite.token)

    @property
    def invite_to_write(self) -> str:
        """The same without the admission token: for files and logs."""
        return "" if self._offline else invite_line(self._swarm.node.directory, self._invite.run, None)

    @property
    def silent_relays(self) -> tuple[str, ...]:
        """Relays that do not answer, as HOST:PORT."""
        return self._relays.silent

    def leave(self) -> None:
        """End: the iterator stops, and so does ``serve``. From any thread, or a signal's handler."""
        self._leaving.set()

    def serve(self) -> None:
        """Give the run's last state to those who come late, until ``leave``. Raises what ended the swarm's side."""
        while not self._leaving.wait(_LOOK_EVERY):
            self._check_alive()

    def _on_anchor(self, anchor: Anchor) -> None:
        with self._news:
            self._newest = anchor
            self._news.notify_all()

    def _check_alive(self) -> None:
        if not self._swarm.alive:
            raise self._swarm.error or NoPeersError("the swarm's thread ended; see events.jsonl, then start again")
        if not (self._offline or self._swarm.node.has_met_others) and time_left(self._settings.give_up_at) == 0.0:
            raise NoPeersError("nobody answered within the time given to join_timeout; ask for a fresh invite")

    def _save(self, anchor: Anchor, least: float) -> None:
        """Keep where this follower stands, at most every ``least`` seconds, and always the end."""
        too_soon = time.monotonic() - self._saved_at < least and not anchor.final
        if too_soon or anchor.head.hash + bytes.fromhex(anchor.digest) == self._saved or self._offline:
            return
        ways = ways_to_others(self._swarm.node.directory)
        keep_state(self.out, anchor, self._known.schema, ways or self._known.ways)
        self._saved_at, self._saved = time.monotonic(), anchor.head.hash + bytes.fromhex(anchor.digest)

    def _end(self) -> None:
        newest = self._newest or self._last
        try:
            if newest is not None:
                self._save(newest, least=0.0)
        finally:
            self._swarm.stop(politely=True)


async def _ask_live(node: Follower) -> frozenset[bytes]:
    return frozenset(node.directory.live())


def follow(
    invite: str,
    *,
    out: str | Path | None = None,
    every: int = 1,
    listen: Sequence[str] | None = None,
    relays: Sequence[str] = (),
    lan: bool = True,
    transport: Transport | str | None = None,
    join_timeout: float | None = None,
    max_upload: float | str | None = None,
    max_download: float | str | None = None,
    max_disk: int | str | None = None,
    kept_files: int = 0,
    keep_serving: bool = False,
) -> Following:
    """Receive the anchors of the run that ``invite`` names, and contribute nothing.

    Args:
        invite: as ``decentral start`` and ``join`` print it.
        out: folder of the follower's key and state; ``decentral-follow-`` and eight digits of the run when not given.
        every: rounds from one anchor to the next; the first and the last always come.
        listen: multiaddrs; all interfaces, any port, when not given.
        relays: multiaddrs of relays, as ``decentral relay`` prints them.
        lan: look for peers of the run on the local networks, too.
        transport: ``daemon``, ``native``, ``py-libp2p``, or one of your own; this system's when not given.
        join_timeout: seconds from this call until NoPeersError, when nobody answers.
        max_upload: what it sends at most, ``"5mbit"`` or bytes per second: a follower gives what it has to others, as
            every peer does. ``max_download`` what it receives.
        max_disk: refuse a model whose state does not fit into ``"10GB"`` or so many bytes of disk.
        kept_files: anchors that the caller keeps beside the state; ``max_disk`` counts them.
        keep_serving: stay reachable when the run is over, for ``serve``; else a run that is over asks nobody.

    Nothing is asked before the ``with`` block. Raises there NoPeersError, InviteError, ManifestMismatch, DiskError (a
    model that is larger than ``max_disk``), DeviceError (larger than this machine's memory).

    """
    if not isinstance(every, int) or every < 1:
        raise UsageError(f"follow(every={every}): at least every round, which is 1")
    check_relays(relays)
    check_value("follow", "join_timeout", join_timeout)
    found = Invite.parse(invite)
    folder = (Path(out) if out is not None else Path(f"decentral-follow-{found.run.hex()[:8]}")).absolute()
    settings = FollowSettings(
        invite=Invite.parse(whole_invite(invite, folder)),
        out=folder,
        every=every,
        listen=None if listen is None else tuple(listen),
        relays=tuple(relays),
        lan=lan,
        transport=transport,
        give_up_at=moment_in(join_timeout),
        caps=Caps(up=rate_of(max_upload, "max_upload"), down=rate_of(max_download, "max_download")),
        max_disk=size_of(max_disk, "max_disk"),
        kept_files=kept_files,
        keep_serving=keep_serving,
    )
    return Following(settings)


# ---- how a follower begins ----
#
# With what is known of the run, its way into the network, and the thread of its node.


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowSettings:
    """The arguments of ``follow``, parsed. Rates in bytes per second."""

    invite: Invite
    out: Path
    every: int  # rounds from one anchor to the next
    listen: tuple[str, ...] | None
    relays: tuple[str, ...]
    lan: bool
    transport: Transport | str | None
    give_up_at: float | None  # monotonic s, when it stops looking for others
    caps: Caps
    max_disk: int | None  # bytes
    kept_files: int  # anchors that the caller keeps beside the state
    keep_serving: bool


@dataclass(frozen=True, slots=True)
class FollowerStartup:
    """Makes the swarm's side of a follower from what is asked and what is known."""

    settings: FollowSettings
    known: FollowerState

    @property
    def offline(self) -> bool:
        """True where the folder holds the run's end and nobody is served: then nobody is asked."""
        head = self.known.head
        return head is not None and head.final and not self.settings.keep_serving

    def swarm(
        self, network: NetworkSetup, events: EventLog, on_anchor: Callable[[Anchor], None]
    ) -> SwarmThread[Follower]:
        """The thread of its node, not yet started."""
        asked, identity = self.settings, self._identity
        token = asked.invite.token
        admission = Admission(token, asked.invite.run, identity.peer) if token is not None else None
        transport = throttle(network.transport, asked.caps, None, admission)

        def on_event(event: str, fields: dict[str, object]) -> None:
            events(event, **fields)

        def make_node(on_update: Callable[..., None]) -> Follower:
            return self._load(
                Follower(
                    self._start(),
                    every=asked.every,
                    on_anchor=on_anchor,
                    signer=identity.signer,
                    transport=transport,
                    on_event=on_event,
                    observe=lambda replica: RoundMetrics(replica, on_event),
                    uplink=lambda: transport.uplink,
                    private=network.is_private,
                    admission=admission,
                )
            )

        async def beside(directory: Directory) -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(network.watch.run, transport)
                if asked.lan:
                    group.start_soon(Lan(on_event).run, directory)

        return SwarmThread(transport, make_node, None if self.offline else beside)

    @property
    def _ways(self) -> tuple[str, ...]:
        """Addresses of peers of the run: of who invited, and of those whom an earlier process knew."""
        return tuple(dict.fromkeys((*self.settings.invite.addresses, *self.known.ways)))

    @property
    def _identity(self) -> Identity:
        return Identity.load_or_create(self.settings.out / "identity.key")

    def enter(self) -> NetworkSetup:
        """The way to the others; a network with nobody in it where it is offline."""
        if self.offline:
            return NetworkSetup(MemoryNetwork().transport(self._identity.signer))
        asked = self.settings
        return enter(asked.transport, self._identity, asked.listen, relays=asked.relays, invited_by=self._ways)

    def _start(self) -> Start:
        known = self.known
        return Start(
            manifest=known.manifest,
            schema=known.schema,
            anchors=[fresh_zeros(fragment.numel) for fragment in known.schema.fragments],
            buffers_B=fresh_zeros(known.schema.buffer_numel),
            founder=False,
            bootstrap=self._ways,
            head=known.head,
            gossip_step=known.gossip_step,
            folder=self.settings.out / "download",
            join_timeout=time_left(self.settings.give_up_at),
        )

    def _load(self, node: Follower) -> Follower:
        """With what an earlier process kept."""
        if self.known.head is not None and self.known.tensors is not None:
            node.replica.load(self.known.tensors)
        return node


def known_of(asked: FollowSettings) -> FollowerState:
    """Return what is known of the run: from an earlier process, else from the first peer that answers."""
    kept = read_state(asked.out, asked.invite.run)
    if kept is not None:
        return kept
    how = asked.transport if isinstance(asked.transport, str) else None
    hello = ask_first_peer(asked.invite, None, time_left(asked.give_up_at), how, lan=asked.lan)
    if len(hello.schema.fragments) != hello.manifest.outer.fragments:
        raise PayloadError("the peer's model has other fragments than the run's terms; ask another for an invite")
    return FollowerState(hello.manifest, hello.schema)
