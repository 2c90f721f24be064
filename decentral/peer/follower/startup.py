"""How a follower begins: what is known of the run, its way into the network, and the thread of its node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from decentral.errors import PayloadError
from decentral.node.follower import Anchor, Follower, FollowerState, kept_state
from decentral.node.node import Start, throttled
from decentral.observe.events import EventLog
from decentral.peer.invitation import greeted
from decentral.peer.network_setup import NetworkSetup, enter
from decentral.swarm.identity import Identity
from decentral.swarm.invite import Admission, Invite
from decentral.swarm.lan import Lan
from decentral.swarm.patience import time_left
from decentral.training.swarm_side import SwarmThread
from decentral.transport import Transport
from decentral.transport.memory import MemoryNetwork
from decentral.transport.throttle import Caps


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowSettings:
    """What ``follow`` was asked for, once sense was made of it. Rates in bytes per second."""

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
        """Whether all there will ever be is here, and nobody is served."""
        head = self.known.head
        return head is not None and head.final and not self.settings.keep_serving

    def swarm(self, events: EventLog, on_anchor: Callable[[Anchor], None]) -> SwarmThread[Follower]:
        """The thread of its node, not yet started."""
        asked, identity = self.settings, Identity.load_or_create(self.settings.out / "identity.key")
        token = asked.invite.token
        admission = Admission(token, asked.invite.run, identity.peer) if token is not None else None
        network = self._enter(identity)
        transport = throttled(network.transport, asked.caps, None, admission)

        def on_event(event: str, fields: dict[str, object]) -> None:
            events(event, **fields)

        def make_node(on_update: Callable[..., None]) -> Follower:
            return self._loaded(
                Follower(
                    self._start(),
                    every=asked.every,
                    on_anchor=on_anchor,
                    signer=identity.signer,
                    transport=transport,
                    on_event=on_event,
                    uplink=lambda: transport.uplink,
                    private=network.is_private,
                    admission=admission,
                )
            )

        return SwarmThread(transport, make_node, Lan(on_event).run if asked.lan and not self.offline else None)

    @property
    def _ways(self) -> tuple[str, ...]:
        """Addresses of peers of the run: of who invited, and of those whom an earlier process knew."""
        return tuple(dict.fromkeys((*self.settings.invite.addresses, *self.known.ways)))

    def _enter(self, identity: Identity) -> NetworkSetup:
        if self.offline:
            return NetworkSetup(MemoryNetwork().transport(identity.signer))
        asked = self.settings
        return enter(asked.transport, identity, asked.listen, relays=asked.relays, invited_by=self._ways)

    def _start(self) -> Start:
        known = self.known
        return Start(
            manifest=known.manifest,
            schema=known.schema,
            anchors=[torch.zeros(fragment.numel) for fragment in known.schema.fragments],
            buffers_B=torch.zeros(known.schema.buffer_numel),
            founder=False,
            bootstrap=self._ways,
            head=known.head,
            gossip_step=known.gossip_step,
            folder=self.settings.out / "download",
            join_timeout=time_left(self.settings.give_up_at),
        )

    def _loaded(self, node: Follower) -> Follower:
        """With what an earlier process kept."""
        if self.known.head is not None and self.known.tensors is not None:
            node.replica.load(self.known.tensors)
        return node


def known_of(asked: FollowSettings) -> FollowerState:
    """What an earlier process kept, or what the first peer that answers says."""
    kept = kept_state(asked.out, asked.invite.run)
    if kept is not None:
        return kept
    how = asked.transport if isinstance(asked.transport, str) else None
    hello = greeted(asked.invite, None, time_left(asked.give_up_at), how, lan=asked.lan)
    if len(hello.schema.fragments) != hello.manifest.outer.fragments:
        raise PayloadError("the peer's model has other fragments than the run's terms; ask another for an invite")
    return FollowerState(hello.manifest, hello.schema)
