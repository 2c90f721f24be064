"""What a peer says of itself: counts rounds, bytes and waiting, and makes the status out of them."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from decentral.consensus.chain import contributions, moves_anchor
from decentral.flow.uplink import lease_bits
from decentral.observe.status import Status
from decentral.rounds.driver import CommittedUpdate
from decentral.rounds.gossip import Swapped
from decentral.training.absence import Away
from decentral.wire.keys import PeerId, peer_name
from decentral.wire.lease import PRIVATE, Lease

if TYPE_CHECKING:
    from decentral.node.node import Node
    from decentral.peer.peer import Peer

logger = logging.getLogger("decentral.peer")

SEEN = 100  # rounds over which "you contributed to 40 of the last 41" is counted
USUAL = 9  # rounds whose median says how long one takes: a stall or two do not move it
RATE_WINDOW = 10.0  # s over which bytes per second are measured
NOTABLE_WAIT = 2.0  # s; every round without overlap waits for its commit, and only a longer wait is worth a word


class Reporter:
    """Counters of one peer; written by the training thread, read by whoever asks for the status."""

    def __init__(
        self,
        emit: Callable[[str, dict[str, object]], None],
        me: PeerId,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emit, self._me = emit, me
        self._clock = clock
        self._outcomes: deque[bool] = deque(maxlen=SEEN)
        self._traffic: deque[tuple[float, int, int]] = deque(maxlen=256)
        self._sent_at_round: deque[int] = deque(maxlen=SEEN)
        self._waiting = False
        self.wanted_members = 0  # for whom training waits before it begins; 0: it does not
        self._loss: float | None = None
        self._held_out_loss: float | None = None
        self._round_began = self._clock()
        self._round_seconds: deque[float] = deque(maxlen=USUAL)
        self.waited = 0.0  # s the training thread stood still for the swarm
        self._wait_began = 0.0
        self.num_steps = 0

    def stepped(self) -> None:
        """One inner step was made."""
        self.num_steps += 1

    def metrics(self, values: dict[str, float]) -> None:
        """Values the training loop logged."""
        self._loss = values.get("loss", self._loss)
        self._held_out_loss = values.get("held_out_loss", self._held_out_loss)
        self._emit("metrics", dict(values))

    def waits(self, waiting: bool) -> None:
        """The training thread begins or ends to wait for the swarm."""
        now = self._clock()
        if waiting:
            self._wait_began = now
        elif self._waiting:
            self.waited += now - self._wait_began
        self._waiting = waiting

    def round_ended(self, advance: CommittedUpdate) -> None:
        """A commit was merged, or changed the membership."""
        record = advance.record
        assert record is not None
        fields: dict[str, object] = {
            "round": record.round,
            "epoch": record.epoch,
            "outer_step": record.outer_step + moves_anchor(record),
            "fragment": record.fragment,
            "contributors": [peer_name(ref.peer) for ref in contributions(record)],
            "members": [peer_name(peer) for peer in record.next_members],
            "contributed": advance.contribution is not None,
            "final": record.final,
            "record": record.hash.hex(),
            "anchor": advance.anchor.hex(),
        }
        self._emit("commit" if moves_anchor(record) else "membership", fields)
        if moves_anchor(record) and (self._me in record.members or advance.contribution is not None):
            self._ended(advance.contribution is not None)  # what ended while it was away is no round that it missed

    def away(self, away: Away) -> None:
        """Progress of an absence is given up, in part or whole."""
        self._emit("away", away.fields())
        logger.warning("%s", away.sentence())

    def restarted(self, why: str) -> None:
        """NaN, and the user wants to go on from the anchor."""
        self._emit("restarted", {"why": why})
        logger.warning("the live model is put back to the anchor: %s", why)

    def swapped(self, outcome: Swapped) -> None:
        """A gossip step was taken."""
        partner = None if outcome.partner is None else peer_name(outcome.partner)
        fields: dict[str, object] = {
            "step": outcome.step,
            "partner": partner,
            "disagreement": outcome.disagreement,
        }
        self._emit("pair", fields)
        self._ended(outcome.partner is not None)

    def _ended(self, contributed: bool) -> None:
        now = self._clock()
        self._outcomes.append(contributed)
        self._round_seconds.append(now - self._round_began)
        self._round_began = now

    def status(self, peer: Peer) -> Status:
        """The status of a peer that talks to the swarm."""
        swarm = peer.swarm
        node, traffic = swarm.node, swarm.transport.traffic
        measuring = node.speed.count
        sent, received = traffic.total.sent - measuring.sent, traffic.total.received - measuring.received
        up, down = self._rates(sent, received)
        rounds = max(1, len(self._outcomes))
        head = node.driver.head
        return Status(
            state=self._state(peer),
            peer=peer_name(node.driver.me),
            run=peer.manifest.run.name,
            run_id=peer.manifest.digest.hex(),
            algorithm=peer.manifest.outer.method,
            round=peer.round,
            rounds=peer.manifest.run.rounds,
            epoch=head.epoch,
            inner_steps=peer.inner_steps,
            members=tuple(self._member(peer, member) for member in head.members),
            given_up=tuple(peer_name(member) for member in sorted(node.driver.given_up)),
            waiting_for=self._awaited(peer) if self._waiting else (),
            wanted_members=self.wanted_members,
            gone=tuple(peer_name(member) for member in sorted(node.company.gone)),
            gone_left=node.company.left,
            rounds_seen=len(self._outcomes),
            rounds_contributed=sum(self._outcomes),
            bytes_sent=sent,
            bytes_received=received,
            bytes_measuring=measuring.sent,
            bytes_per_round=sent / rounds,
            sent_per_second=up,
            received_per_second=down,
            max_upload=peer.settings.caps.up,
            max_download=peer.settings.caps.down,
            daily_upload=None if node.daily_upload is None else node.daily_upload.limit,
            sent_today=0 if node.daily_upload is None else node.daily_upload.sent,
            uplink_bits=lease_bits(node.uplink()),
            next_sync_seconds=self._next_sync(),
            seconds_left=self._left(peer),
            loss=self._loss,
            notices=peer.notices.now(head.round),
            held_out_loss=self._held_out_loss,
            own_loop=True,
            trains_while_paused=True,
            anchor_digest=peer.anchor_digest,
            invite=peer.invite,
            addresses=swarm.transport.addresses(),
            reachability=peer.entrance.kind,
            relays=peer.entrance.relays,
        )

    def _state(self, peer: Peer) -> str:
        node = peer.swarm.node
        if peer.done:
            return "done"
        if node.state in ("leaving", "syncing"):
            return str(node.state)
        if not node.ready.is_set():
            return "starting"
        if peer.paused:
            return "paused"
        if self.wanted_members:
            return "waiting"
        if node.resting:
            return "resting"
        if self._waiting and self._clock() - self._wait_began > NOTABLE_WAIT:
            return "waiting"
        alone = not node.directory.live()
        return "looking" if alone else "training"

    def _member(self, peer: Peer, member: bytes) -> dict[str, object]:
        node = peer.swarm.node
        lease = node.directory.live().get(member)
        here = member == node.driver.me
        count = peer.swarm.transport.traffic.of(member)
        return {
            "peer": peer_name(member),
            "self": here,
            "live": here or lease is not None,
            "round": peer.round if here else self._round_of(node, lease),
            "bytes_sent": count.sent,
            "bytes_received": count.received,
            **({} if here else self._way(peer, member)),
        }

    def _round_of(self, node: Node, lease: Lease | None) -> int | None:
        """Outer steps of another member, from the height that its lease tells; in gossip none tells them."""
        if lease is None or node.gossip is not None:
            return None
        return node.driver.machine.history.outer_steps_at(lease.round)

    def _way(self, peer: Peer, member: bytes) -> dict[str, object]:
        """How a member is reached; directly although both are private is punched."""
        node = peer.swarm.node
        path, lease = node.paths.get(member), node.directory.live().get(member)
        if path is None and lease is not None:
            node.paths.look_soon()  # the next status has it
        hidden = lease is not None and bool(lease.state & PRIVATE) and peer.entrance.is_private
        names = {None: None, False: "relayed", True: "punched" if hidden else "direct"}
        return {
            "path": names[None if path is None else path.direct],
            "relayed_share": None if path is None else round(path.relayed_share, 3),
            "answers_in": node.directory.answered_in.get(member),
            "uplink_bits": 0 if lease is None else lease.uplink,
        }

    def _awaited(self, peer: Peer) -> tuple[str, ...]:
        machine = peer.swarm.node.driver.machine
        offered = set(machine.round.offers)
        absent = [p for p in machine.head.members if p not in offered and machine.presence.present(p)]
        return tuple(peer_name(p) for p in absent)

    def _rates(self, sent: int, received: int) -> tuple[float, float]:
        now = self._clock()
        self._traffic.append((now, sent, received))
        while len(self._traffic) > 2 and now - self._traffic[0][0] > RATE_WINDOW:
            self._traffic.popleft()
        then, sent_then, received_then = self._traffic[0]
        elapsed = max(now - then, 1e-3)
        return (sent - sent_then) / elapsed, (received - received_then) / elapsed

    def _next_sync(self) -> float | None:
        if not self._round_seconds:
            return None
        return max(0.0, self._round_began + self._round_seconds[-1] - self._clock())

    def _left(self, peer: Peer) -> float | None:
        """Seconds until the last round, or until the run's time is up; None: neither is known."""
        run, known = peer.manifest.run, []
        if self._round_seconds:
            known.append(max(0, run.rounds - peer.round) * statistics.median(self._round_seconds))
        if run.minutes is not None:
            known.append(max(0.0, 60 * run.minutes - peer.swarm.node.age))
        return min(known, default=None)
