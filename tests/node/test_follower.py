"""Followers beside real nodes in memory, under virtual time: what they receive, and that nobody counts them."""

from __future__ import annotations

import anyio
import pytest
import torch

from decentral.flow.waiting import inline
from decentral.node.follower import Anchor, Follower
from decentral.node.node import END_TIMEOUT, Start
from decentral.rounds.snapshots import CHAIN, INDEX
from decentral.swarm.directory import Directory
from decentral.transport.requests import serve_requests
from tests.kit.nodes import Lab, Teller, scene, signer_of, small_terms
from tests.kit.tables import DOSED_WIRES


class Watcher(Teller):
    """A follower of a lab's run; it knows one of the peers and no model."""

    def __init__(self, lab: Lab, number: int = 100, every: int = 1, *, kept: Anchor | None = None) -> None:
        super().__init__()
        self.lab, self.signer = lab, signer_of(number)
        self.transport = lab.network.transport(self.signer)
        self.anchors: list[Anchor] = []
        start = Start(
            manifest=lab.manifest,
            schema=lab.schema,
            anchors=[torch.zeros(fragment.numel) for fragment in lab.schema.fragments],
            buffers_B=torch.zeros(lab.schema.buffer_numel),
            founder=False,
            bootstrap=lab.bootstrap(),
            head=None if kept is None else kept.head,
        )
        self.node = Follower(
            start,
            every=every,
            on_anchor=self.anchors.append,
            signer=self.signer,
            transport=self.transport,
            on_event=lambda event, fields: self.events.append((event, fields)),
            offload=inline,
        )
        if kept is not None:
            self.node.replica.load(kept.shared)
        self.scope = anyio.CancelScope()
        assert lab.group is not None
        lab.group.start_soon(self.live)

    async def live(self) -> None:
        with self.scope:
            async with self.transport, anyio.create_task_group() as group:
                await group.start(self.node.run)

    def check_equal(self) -> None:
        """Each anchor has the digest that the members had after as many outer steps."""
        members = {
            update.record.outer_step + 1: update.anchor.hex()
            for member in self.lab.members
            for update in member.all_updates
            if update.record is not None and update.record.frames
        }
        found = {anchor.round: anchor.digest for anchor in self.anchors if anchor.round in members}
        assert found
        assert found == {round_: members[round_] for round_ in found}
        for anchor in self.anchors:
            flats = [anchor.shared[f"anchor/{f}"] for f in range(len(self.lab.schema.fragments))]
            assert torch.equal(torch.cat([t.flatten() for t in anchor.named.values()]), torch.cat(flats))


def check_never_counted(lab: Lab, watcher: Watcher) -> None:
    """No record, ballot or head of a member names it, and none of them was asked to let it in."""
    me = watcher.signer.peer
    for member in lab.members:
        driver = member.node.driver
        assert me not in driver.head.members
        assert me not in driver.machine.state.joiners
        for update in member.all_updates:
            assert update.record is None or me not in (*update.record.members, *update.record.next_members)
        assert all(me not in {peer for peer, _ in commit.certificate.votes} for commit in member.log)
    assert watcher.node.driver.machine.state.acceptor.promised <= 0


@pytest.mark.parametrize("preset", DOSED_WIRES)
@scene(peers=3)
async def test_a_follower_has_the_very_bits_of_every_round_and_is_never_counted(lab, preset):
    watcher = Watcher(lab)
    await lab.until(lambda: watcher.anchors)
    first = watcher.anchors[0].round
    await lab.rounds(6)
    await lab.until(lambda: watcher.anchors[-1].round >= first + 5)
    watcher.check_equal()
    rounds = [anchor.round for anchor in watcher.anchors]
    assert rounds == list(range(first, first + len(rounds))), "each round's, in order"
    assert not watcher.happened("resynced"), "by frames, not by snapshots"
    check_never_counted(lab, watcher)
    anchor, found = watcher.anchors[0], watcher.anchors[0].state_dict()
    lab.make_model().load_state_dict(found)
    found["emb"].add_(1.0)
    assert not torch.equal(found["emb"], anchor.named["emb"]), "a copy, in the shapes of the model"


@scene(lambda: small_terms("diloco", lease=20.0, shrink_after=60.0).changed(run={"rounds": 11}))
async def test_every_third_anchor_is_a_third_one_and_the_last_one_comes_before_the_peers_are_gone(lab):
    async def ends(member):
        while not member.node.driver.head.final:
            await anyio.sleep(0.05)
        await member.end()

    for _ in range(2):
        lab.group.start_soon(ends, lab.add())
    await lab.all_members()
    watcher = Watcher(lab, every=3)
    await lab.until(lambda: not lab.alive())
    await lab.until(lambda: watcher.anchors[-1].final, limit=1.0)
    watcher.check_equal()
    _, *between, last = [anchor.round for anchor in watcher.anchors]
    assert [round_ for round_ in between if round_ % 3] == []
    assert last == 11
    assert watcher.anchors[-1].digest == lab.members[0].node.replica.digest.hex()
    check_never_counted(lab, watcher)


@scene(lambda: small_terms("diloco", lease=40.0, shrink_after=60.0).changed(run={"rounds": 5}))
async def test_peers_wait_for_a_follower_that_fell_silent_no_longer_than_for_one_another(lab):
    member = lab.add()
    await lab.until(lambda: member.node.ready.is_set())
    watcher = Watcher(lab)
    await lab.until(lambda: watcher.anchors)
    lab.network.cut(watcher.signer.peer, member.signer.peer)
    await lab.until(lambda: member.node.driver.head.final)
    began = anyio.current_time()
    await member.node.see_others_to_the_end()
    assert anyio.current_time() - began <= END_TIMEOUT


@pytest.mark.parametrize("preset", ["sparseloco", "diloco"])
@scene(peers=4)
async def test_it_goes_on_with_other_donors_when_the_one_it_knows_dies(lab, preset):
    watcher = Watcher(lab)
    await lab.until(lambda: watcher.anchors)
    lab.members[0].kill()
    await lab.rounds(2)
    lab.members[1].kill()
    await lab.rounds(4)
    newest = max(member.rounds for member in lab.alive())
    await lab.until(lambda: watcher.anchors[-1].round >= newest)
    watcher.check_equal()
    check_never_counted(lab, watcher)


async def claim_to_be_ahead(lab: Lab) -> None:
    """A peer with a lease of a round that nobody will reach, and not a byte of a chain."""

    async def nothing(peer: bytes, body: bytes) -> bytes:
        return b""

    signer = signer_of(101)
    transport = lab.network.transport(signer)
    directory = Directory(transport, signer, lab.manifest.digest, ttl=lab.manifest.swarm.lease)
    serve_requests(transport, CHAIN, nothing, limit=1 << 16)
    serve_requests(transport, INDEX, nothing, limit=0)
    directory.own.update(round=10**9, digest=bytes(32))
    directory.add_bootstrap(lab.bootstrap())
    async with transport:
        await directory.run()


@scene(peers=2)
async def test_a_peer_that_claims_to_be_far_ahead_and_gives_nothing_costs_one_turn_at_a_time(lab):
    lab.group.start_soon(claim_to_be_ahead, lab)
    liar = signer_of(101).peer
    await lab.until(lambda: all(liar in member.node.directory.live() for member in lab.members))
    watcher = Watcher(lab)
    await lab.until(lambda: watcher.anchors)
    goal = watcher.anchors[-1].round + 8
    await lab.until(lambda: watcher.anchors[-1].round >= goal, limit=120.0)
    watcher.check_equal()


@scene(peers=3)
async def test_a_follower_that_was_away_goes_on_from_what_it_kept_by_the_commits_it_missed(lab):
    watcher = Watcher(lab)
    await lab.until(lambda: len(watcher.anchors) >= 2)
    watcher.scope.cancel()
    await lab.rounds(4)
    again = Watcher(lab, 102, kept=watcher.anchors[-1])
    newest = max(member.rounds for member in lab.members)
    await lab.until(lambda: again.anchors and again.anchors[-1].round >= newest)
    assert again.anchors[0].digest == watcher.anchors[-1].digest
    assert len(again.anchors) >= 5, "each round that was missed, too"
    assert not again.happened("synced")
    assert not again.happened("resynced")
    again.check_equal()


@scene("noloco", peers=3)
async def test_in_gossip_it_takes_the_replica_of_one_peer_and_at_the_end_what_all_merged(lab):
    watcher = Watcher(lab)
    await lab.until(lambda: len(watcher.anchors) >= 3)
    assert all(anchor.peer.startswith("12D3KooW") for anchor in watcher.anchors)
    for member in lab.members:
        member.idle = True
    await lab.until(lambda: all(member.node.driver.head.final for member in lab.members))
    await lab.until(lambda: watcher.anchors[-1].final)
    last = watcher.anchors[-1]
    assert last.peer == ""
    assert {member.node.replica.digest.hex() for member in lab.members} == {last.digest}
    steps = [anchor.round for anchor in watcher.anchors]
    assert steps == sorted(steps)
    check_never_counted(lab, watcher)


@scene(lambda: small_terms("sparseloco").changed(run={"rounds": 6}), peers=2)
async def test_who_comes_after_all_peers_have_gone_gets_the_last_anchor_from_a_follower(lab):
    watcher = Watcher(lab)
    await lab.until(lambda: watcher.anchors and watcher.anchors[-1].final)
    for member in lab.members:
        await member.node.leave()
        member.kill()
    late = lab.add(founder=False)
    late.node.directory.add_bootstrap(watcher.transport.addresses())
    await lab.until(lambda: late.node.ready.is_set())
    assert late.node.driver.head.final
    assert late.node.replica.digest.hex() == watcher.anchors[-1].digest
