from __future__ import annotations

import itertools
from dataclasses import replace

import anyio
import pytest
import torch

from decentral.dissemination import broadcast
from decentral.errors import PayloadError
from decentral.replica.contribution import Contribution
from decentral.rounds.gossip import PAIR, UNDECIDED
from decentral.rounds.partners import AHEAD, matching, partner_of
from decentral.transport.memory import Weight
from decentral.wire.frames import Frame
from decentral.wire.keys import peer_name
from tests.kit.nodes import tiny_model


def test_a_matching_covers_every_member_once_and_changes_with_the_step():
    members = [bytes([i]) * 32 for i in range(8)]
    groups = matching(b"run", 3, members)
    assert sorted(peer for group in groups for peer in group) == members
    assert all(len(group) == 2 for group in groups)
    assert matching(b"run", 3, list(reversed(members))) == groups
    assert len({tuple(matching(b"run", step, members)) for step in range(20)}) > 10


def test_with_an_odd_number_one_member_is_left_over_and_everybody_agrees_who():
    members = [bytes([i]) * 32 for i in range(5)]
    for step in range(10):
        alone = [peer for peer in members if partner_of(b"run", step, members, peer) is None]
        assert len(alone) == 1
        for peer in members:
            partner = partner_of(b"run", step, members, peer)
            assert partner is None or partner_of(b"run", step, members, partner) == peer


def test_a_pair_applies_the_same_mean_and_conserves_the_average(run_lab, terms):
    async def script(lab):
        for _ in range(2):
            lab.add()
        await lab.all_members()
        for member in lab.members:
            member.pull = 0.0
        a, b = (member.node.replica for member in lab.members)
        await lab.until(lambda: all(len(m.swaps) >= 2 for m in lab.members))
        a.anchors[0], b.anchors[0] = lab.members[0].target(0), lab.members[1].target(0)
        for replica in (a, b):
            replica.states[0] = {"momentum": torch.zeros_like(replica.anchors[0])}
        before = (a.anchors[0] + b.anchors[0]) / 2
        count = max(len(m.swaps) for m in lab.members) + 3
        await lab.until(lambda: all(len(m.swaps) >= count for m in lab.members))
        await lab.until(lambda: len(lab.members[0].swaps) == len(lab.members[1].swaps))
        torch.testing.assert_close((a.anchors[0] + b.anchors[0]) / 2, before, rtol=1e-4, atol=1e-4)

    run_lab(terms("noloco"), script)


@pytest.mark.parametrize("num_peers", [3, 4])
def test_gossip_contracts_the_disagreement_and_reaches_the_mean_of_the_targets(run_lab, terms, num_peers):
    async def script(lab):
        for _ in range(num_peers):
            lab.add()
        await lab.all_members()
        await lab.until(lambda: all(len(m.swaps) >= 25 for m in lab.members))
        anchors = [m.node.replica.anchors[0] for m in lab.members]
        mean, goal = sum(anchors) / num_peers, sum(m.target(0) for m in lab.members) / num_peers
        assert (mean - goal).norm() < 0.5 * goal.norm()
        swapped = [s for m in lab.members for s in m.swaps[-10:] if s.disagreement is not None]
        assert swapped
        assert max(s.disagreement for s in swapped) < 2.0

    run_lab(terms("noloco"), script)


def test_a_partner_that_dies_costs_a_step_alone_and_no_hang(run_lab, terms):
    async def script(lab):
        for _ in range(4):
            lab.add()
        await lab.all_members()
        await lab.until(lambda: all(len(m.swaps) >= 3 for m in lab.members))
        lab.members[1].kill()
        goal = max(len(m.swaps) for m in lab.alive()) + 6
        await lab.until(lambda: all(len(m.swaps) >= goal for m in lab.alive()))
        await lab.all_members()

    run_lab(terms("noloco"), script)


def test_a_gossip_run_ends_with_one_merge_that_all_peers_hold_alike(run_lab, terms):
    async def script(lab):
        for _ in range(4):
            lab.add()
        await lab.all_members()
        await lab.until(lambda: all(len(m.swaps) >= 4 for m in lab.members))
        for member in lab.members:
            member.idle = True
        await lab.until(lambda: all(m.node.driver.head.final for m in lab.members))
        assert len({m.node.replica.digest for m in lab.members}) == 1
        assert len(lab.members[0].log[-1].record.frames) == 4

    run_lab(terms("noloco"), script)


def test_a_late_joiner_gossips_from_a_donors_parameters(run_lab, terms):
    async def script(lab):
        for _ in range(3):
            lab.add()
        await lab.all_members()
        await lab.until(lambda: all(len(m.swaps) >= 4 for m in lab.members))
        joiner = lab.add()
        await lab.all_members()
        await lab.until(lambda: any(s.partner is not None for s in joiner.swaps))
        assert joiner.node.gossip.step >= 4

    run_lab(terms("noloco"), script)


def test_a_member_that_fell_behind_jumps_to_the_step_of_the_others_instead_of_waiting_at_each(run_lab, terms):
    async def script(lab):
        for _ in range(3):
            lab.add()
        await lab.all_members()
        await lab.until(lambda: all(len(m.swaps) >= 3 for m in lab.members))
        slow = lab.members[2].node.gossip
        lab.members[0].node.gossip.partners.step += 40
        lab.members[1].node.gossip.partners.step += 40
        await lab.until(lambda: slow.step >= 40, limit=100)
        count = len(lab.members[2].swaps)
        await lab.until(lambda: any(s.partner is not None for s in lab.members[2].swaps[count:]), limit=100)

    run_lab(terms("noloco"), script)


@pytest.mark.parametrize("beyond", [0, 2**64 - 3])
def test_a_frame_for_a_step_that_the_run_has_not_moves_nobody(run_lab, terms, beyond):
    """Of two peers one said that it was at step 2**64 - 3: the other went there, and ended three steps later."""

    async def script(lab):
        for _ in range(2):
            lab.add()
        await lab.all_members()
        await lab.until(lambda: all(len(member.swaps) > 1 for member in lab.members))
        told, liar = lab.members
        mine = Contribution(0, b"", torch.zeros(1), torch.zeros(1), 1, 1, states=(torch.zeros(1),))
        said = told.node.gossip._header(told.node.driver.head, mine)
        header = replace(said, sender=liar.signer.peer, round=max(beyond, lab.manifest.run.rounds))
        before = told.node.gossip.step
        with pytest.raises(PayloadError, match=f"of a run of {lab.manifest.run.rounds}"):
            told.node.gossip.partners.take(Frame(header, b""), torch.zeros(1), told.node.driver.head)
        await lab.until(lambda: all(len(member.swaps) > 4 for member in lab.members))
        assert before < told.node.gossip.step < before + 10

    run_lab(terms("noloco"), script)


def test_partners_that_could_not_reach_each_other_for_a_while_swap_again(run_lab, terms):
    """A failed send marked the partner as away, and no message of rounds ever said that it was back."""

    async def script(lab):
        one, other = lab.add(), lab.add()
        await lab.all_members()
        await lab.until(lambda: one.swaps and one.swaps[-1].partner is not None)
        lab.cut([one], [other])
        await lab.until(lambda: all(member.swaps[-1].partner is None for member in (one, other)))
        lab.heal([one], [other])
        await lab.until(lambda: all(member.swaps[-1].partner is not None for member in (one, other)), limit=60.0)

    run_lab(terms("noloco", lease=60.0, shrink_after=600.0), script)


def test_a_member_that_went_on_alone_goes_back_to_the_step_of_the_others(run_lab, terms):
    """It would wait a deadline at every step for one that does not come, until the others have made as many steps."""

    async def script(lab):
        for _ in range(4):
            lab.add()
        await lab.all_members()
        await lab.until(lambda: all(any(s.partner is not None for s in m.swaps) for m in lab.members))
        alone = lab.members[3]
        lab.cut([alone], lab.members[:3])
        await lab.until(lambda: alone.swaps[-1].partner is None)
        alone.node.gossip.partners.step += 400
        lab.heal([alone], lab.members[:3])
        ahead = len(alone.swaps)
        await lab.until(lambda: any(s.partner is not None for s in alone.swaps[ahead:]), limit=60.0)
        steps = [member.node.gossip.step for member in lab.members]
        assert max(steps) - min(steps) <= AHEAD
        paired = [s.step for s in alone.swaps if s.partner is not None]
        assert len(paired) == len(set(paired)), "no number is shared twice"

    run_lab(terms("noloco", lease=60.0, shrink_after=600.0), script)


def test_a_peer_cut_off_from_all_does_not_go_back_on_what_it_remembers_of_them(run_lab, terms):
    async def script(lab):
        for _ in range(4):
            lab.add()
        await lab.all_members()
        await lab.until(lambda: all(len(m.swaps) >= 4 for m in lab.members))
        alone = lab.members[3]
        lab.cut([alone], lab.members[:3])
        begun = len(alone.swaps)
        await lab.until(lambda: len(alone.swaps) >= begun + 2 * AHEAD, limit=600.0)
        steps = [swap.step for swap in alone.swaps[begun:]]
        assert steps == sorted(set(steps))

    run_lab(terms("noloco", lease=6.0, shrink_after=600.0), script)


def test_a_jump_never_swaps_one_fragment_for_another(run_lab, terms):
    async def script(lab):
        for _ in range(2):
            lab.add()
        await lab.all_members()
        await lab.until(lambda: all(any(s.partner is not None for s in m.swaps) for m in lab.members))
        begun = len(lab.members[0].swaps)
        await lab.until(lambda: len(lab.members[0].swaps) > begun)
        lab.members[
            0
        ].node.gossip.partners.step += 40  # between two steps; the other makes one more, and then jumps by 39
        before = [len(m.swaps) for m in lab.members]
        await lab.until(
            lambda: all(
                sum(s.partner is not None for s in m.swaps[n:]) >= 4 for m, n in zip(lab.members, before, strict=True)
            ),
            limit=100,
        )
        for member in lab.members:
            numels = [fragment.numel for fragment in member.node.start.schema.fragments]
            assert all(swap.after_N.numel() == numels[swap.step % 2] for swap in member.swaps)

    halves = terms("noloco")
    run_lab(halves.model_copy(update={"outer": halves.outer.model_copy(update={"fragments": 2})}), script)


def told_alike(one, other):
    """Of every step that both have taken: whether both took it with each other, or both alone."""
    with_partner = [{swap.step: swap.partner is not None for swap in member.swaps} for member in (one, other)]
    both = with_partner[0].keys() & with_partner[1].keys()
    return [with_partner[0][step] == with_partner[1][step] for step in sorted(both)]


def test_a_thin_uplink_makes_no_pair_by_half(run_lab, terms):
    """The commit stood behind the frame's last megabyte for longer than it was asked about: one took the step alone."""

    async def script(lab):
        lab.network.weights = {broadcast.PUSH: Weight(1000.0)}
        one, other = lab.add(), lab.add()
        await lab.all_members()
        leader = min(one.signer.peer, other.signer.peer)
        lab.network.set_uplink(leader, 115_000.0)  # a megabyte, as much as is under way, takes 9 s
        await lab.until(lambda: all(len(member.swaps) >= 5 for member in (one, other)), limit=900.0)
        assert all(told_alike(one, other))
        assert any(swap.partner is not None for swap in one.swaps[2:])

    run_lab(terms("noloco", deadline_ceiling=60.0, lease=60.0, shrink_after=600.0), script, make_model=tiny_model)


class _Deaf:
    """A stream whose answer never comes, as on a connection that broke behind the question."""

    def __init__(self, stream):
        self.stream, self.peer = stream, stream.peer
        self.send, self.aclose = stream.send, stream.aclose

    async def receive_exactly(self, nbytes, on_bytes=None):
        await anyio.sleep_forever()


def test_an_answer_that_is_lost_is_asked_for_again_while_the_first_question_hangs(run_lab, terms):
    async def script(lab):
        one, other = lab.add(), lab.add()
        await lab.all_members()
        leader = min((one, other), key=lambda member: member.signer.peer)
        whole, count = leader.transport.open, itertools.count()

        async def every_other_is_deaf(peer, protocol):
            stream = await whole(peer, protocol)
            return _Deaf(stream) if protocol == PAIR and next(count) % 2 == 0 else stream

        leader.transport.open = every_other_is_deaf
        begun = len(leader.swaps) + 1
        await lab.until(lambda: all(len(member.swaps) >= begun + 4 for member in (one, other)))
        assert all(told_alike(one, other)[begun:])
        assert all(swap.partner is not None for swap in leader.swaps[begun:])
        assert not any(name == "undecided" for name, _ in leader.events)

    run_lab(terms("noloco"), script, make_model=tiny_model)


def test_a_leader_that_never_hears_whether_the_pair_was_made_says_so(run_lab, terms):
    """It cannot be known (Gray 1978); that it is not known is told, where only the disagreement had shown it."""

    async def script(lab):
        one, other = lab.add(), lab.add()
        await lab.all_members()
        leader, follower = sorted((one, other), key=lambda member: member.signer.peer)
        whole = leader.transport.open

        async def deaf(peer, protocol):
            stream = await whole(peer, protocol)
            return _Deaf(stream) if protocol == PAIR else stream

        leader.transport.open = deaf
        await lab.until(lambda: any(name == "undecided" for name, _ in leader.events), limit=60.0)
        fields = next(fields for name, fields in leader.events if name == "undecided")
        assert fields == {"round": fields["round"], "peer": peer_name(follower.signer.peer), "seconds": UNDECIDED}

    run_lab(terms("noloco"), script, make_model=tiny_model)


def test_a_partner_that_dropped_the_frame_says_no_instead_of_wait(run_lab, terms):
    """It was too far ahead when it came. Then both waited out the eight seconds for which a commit is asked about."""

    async def script(lab):
        one, other = lab.add(), lab.add()
        await lab.all_members()
        follower = max((one, other), key=lambda member: member.signer.peer)
        follower.node.gossip.partners.take = lambda frame, decoded, head: None
        counts = [len(member.swaps) for member in (one, other)]
        began = anyio.current_time()
        await lab.until(lambda: all(len(m.swaps) > n + 3 for m, n in zip((one, other), counts, strict=True)))
        assert anyio.current_time() - began < 3 * UNDECIDED
        assert all(told_alike(one, other)[max(counts) + 1 :])

    run_lab(terms("noloco"), script, make_model=tiny_model)


def test_a_step_says_whether_pairs_meet_in_it_and_one_in_which_nobody_does_is_taken_alone(run_lab, terms):
    async def script(lab):
        members = [lab.add() for _ in range(2)]
        await lab.all_members()
        begun = max(len(member.swaps) for member in members) + 1
        await lab.until(lambda: all(sum(s.matched for s in m.swaps[begun:]) >= 2 for m in members))
        for member in members:
            method, swaps = member.node.replica.method, member.swaps[begun:]
            assert [s.matched for s in swaps] == [method.meets(s.step) for s in swaps]
            assert any(not s.matched for s in swaps)
            assert all(s.partner is None for s in swaps if not s.matched)

    run_lab(terms("late_merge"), script)
