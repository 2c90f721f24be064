"""What a peer that takes part consists of, on the one of its processes that talks to the swarm."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from decentral.errors import DecentralError
from decentral.node.durable_store import DurableStore
from decentral.node.node import Node
from decentral.peer.network_setup import NetworkSetup
from decentral.peer.saved.write_behind import WriteBehind
from decentral.peer.settings import Settings
from decentral.peer.shown.announcer import Announcer
from decentral.swarm.identity import Identity
from decentral.swarm.invite import Invite
from decentral.training.outer_loop import OuterLoop
from decentral.training.reporting import Diagnosed, Reporter
from decentral.training.swarm_side import SwarmThread
from decentral.transport.throttle import ThrottledTransport
from decentral.wire.keys import peer_name


@dataclass(slots=True)
class StepCount:
    """Inner steps of this peer, over all its lives."""

    value: int = 0


class Participation:
    """The parts, each there from the moment in which `Startup` has made it."""

    def __init__(self, settings: Settings, announce: Announcer, token: str | None) -> None:
        self.settings, self.announce, self.token = settings, announce, token
        self.was_here = settings.identity_path.exists()  # its key is an older one
        self.identity = Identity.load_or_create(settings.identity_path)
        announce.open(settings.out, peer_name(self.identity.peer))
        self.store = DurableStore(settings.out)
        self.reporter = Reporter(announce, self.identity.peer)
        self.diagnosed = Diagnosed(announce)
        self.behind = WriteBehind()  # checkpoints
        self.was_over = False  # the folder held the run's last commit when this peer began: nothing is trained
        self._network: NetworkSetup | None = None
        self._swarm: SwarmThread[Node] | None = None
        self._links: ThrottledTransport | None = None
        self._loop: OuterLoop | None = None
        self._is_closed = False

    @property
    def is_offline(self) -> bool:
        """Whether this peer, for whom the run is over, gets in touch with nobody."""
        return self.was_over and not self.settings.options.keep_serving

    @property
    def is_up(self) -> bool:
        """Whether there is a swarm side, with its node: another thread may ask while it is made."""
        return self._swarm is not None and self._swarm.has_node

    @property
    def has_begun(self) -> bool:
        """Whether there is an outer loop."""
        return self._loop is not None

    @property
    def network(self) -> NetworkSetup:
        """How it is reached; before the swarm side is up."""
        assert self._network is not None
        return self._network

    @network.setter
    def network(self, found: NetworkSetup) -> None:
        self._network = found

    @property
    def swarm(self) -> SwarmThread[Node]:
        """The swarm side, from before it joins."""
        assert self._swarm is not None
        return self._swarm

    @swarm.setter
    def swarm(self, made: SwarmThread[Node]) -> None:
        self._swarm = made

    @property
    def links(self) -> ThrottledTransport:
        """What holds to the caps, from before the swarm side is up."""
        assert self._links is not None
        return self._links

    @links.setter
    def links(self, made: ThrottledTransport) -> None:
        self._links = made

    @property
    def loop(self) -> OuterLoop:
        """The training side, once it stands at an anchor."""
        assert self._loop is not None
        return self._loop

    @loop.setter
    def loop(self, made: OuterLoop) -> None:
        self._loop = made

    @property
    def acts_before_inner_steps(self) -> bool:
        """Whether the run's method does something before inner steps; then this peer is one process."""
        return self.swarm.node.replica.method.overrides("before_inner_step")

    @property
    def invite(self) -> str:
        """The line that lets others join by way of this peer or of up to three more; empty while nobody could."""
        reachable = self._swarm is not None and not self.is_offline
        addresses = self.swarm.node.directory.ways_in() if reachable else ()
        return str(Invite(self.settings.manifest.digest, addresses, self.token)) if addresses else ""

    def save_now(self) -> bool:
        """Write a checkpoint, and return when it is durable; False when this is no moment for one. Raises DiskError."""
        self.behind.wait()
        saved = self.loop.save()
        self.behind.wait()
        return saved

    def close(self, *, politely: bool = False) -> None:
        """End the swarm's side, saying goodbye when ``politely``, and close the files. A second time does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._swarm is not None:
            self._swarm.stop(politely=politely)
        with suppress(DecentralError):  # a last checkpoint was waited for before, where there was to be one
            self.behind.wait()
        self.store.close()
        self.announce.close()
