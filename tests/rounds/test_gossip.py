"""Gossip on real nodes: who meets whom in which step, what both take over, and what of it is told."""

from __future__ import annotations

import itertools
from dataclasses import replace

import anyio
import pytest
import torch

from decentral.dissemination import broadcast
from decentral.errors import PayloadError
from decentral.manifest import preset_manifest
from decentral.optimizers import make_outer
from decentral.replica.contribution import Contribution
from decentral.rounds import gossip, partners
from decentral.rounds.gossip import PAIR, UNDECIDED
from decentral.rounds.partners import (
    AHEAD,
    LANE,
    LANE_NBYTES,
    LATEST,
    Lanes,
    Partners,
    Punctuality,
    cut,
    matching,
    partner_of,
)
from decentral.transport.memory import Weight
from decentral.wire.frames import Frame, FrameKind, Header, seal
from decentral.wire.keys import peer_name
from tests.kit.nodes import run_in_lab, scene, signer_of, small_terms, tiny_model


def together(member):
    return [swap for swap in member.swaps if swap.partner is not None]


async def swap_on(lab, count: int, limit: float = 300.0) -> None:
    """Until all have so many swaps more than whoever has the most now."""
    goal = max(len(member.swaps) for member in lab.alive()) + count
    await lab.until(lambda: all(len(member.swaps) >= goal for member in lab.alive()), limit)


async def meet(lab, count: int = 1, limit: float = 300.0) -> None:
    """Until each has swapped so many times more with a partner."""
    goals = [(member, len(together(member)) + count) for member in lab.alive()]
    await lab.until(lambda: all(len(together(member)) >= goal for member, goal in goals), limit)


def patient(**limits: float):
    return small_terms("noloco", **{"lease": 60.0, "shrink_after": 600.0, **limits})


# ---- who meets whom ----


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


@scene("noloco", peers=3)
async def test_a_late_joiner_gossips_from_a_donors_parameters(lab):
    await swap_on(lab, 4)
    joiner = lab.add()
    await lab.all_members()
    await lab.until(lambda: together(joiner))
    assert joiner.node.gossip.step >= 4


@scene("noloco", peers=3)
async def test_a_member_that_fell_behind_jumps_to_the_step_of_the_others_instead_of_waiting_at_each(lab):
    await swap_on(lab, 3)
    *others, slow = lab.members
    for member in others:
        member.node.gossip.partners.step += 40
    await lab.until(lambda: slow.node.gossip.step >= 40, limit=100)
    count = len(together(slow))
    await lab.until(lambda: len(together(slow)) > count, limit=100)


@pytest.mark.parametrize("beyond", [0, 2**64 - 3])
@scene("noloco", peers=2)
async def test_a_frame_for_a_step_that_the_run_has_not_moves_nobody(lab, beyond):
    """Of two peers one said that it was at step 2**64 - 3: the other went there, and ended three steps later."""
    await swap_on(lab, 2)
    told, liar = lab.members
    mine = Contribution(0, b"", torch.zeros(1), torch.zeros(1), 1, 1, states=(torch.zeros(1),))
    said = told.node.gossip._header(told.node.driver.head, mine)
    header = replace(said, sender=liar.signer.peer, round=max(beyond, lab.manifest.run.rounds))
    before = told.node.gossip.step
    with pytest.raises(PayloadError, match=f"of a run of {lab.manifest.run.rounds}"):
        told.node.gossip.partners.take(Frame(header, b""), torch.zeros(1), told.node.driver.head)
    await swap_on(lab, 3)
    assert before < told.node.gossip.step < before + 10


@scene(patient, peers=2)
async def test_partners_that_could_not_reach_each_other_for_a_while_swap_again(lab):
    """A failed send marked the partner as away, and no message of rounds ever said that it was back."""
    one, other = lab.members
    await lab.until(lambda: one.swaps and one.swaps[-1].partner is not None)
    lab.cut([one], [other])
    await lab.until(lambda: all(member.swaps[-1].partner is None for member in (one, other)))
    lab.heal([one], [other])
    await lab.until(lambda: all(member.swaps[-1].partner is not None for member in (one, other)), limit=60.0)


@scene(patient, peers=4)
async def test_a_member_that_went_on_alone_goes_back_to_the_step_of_the_others(lab):
    """It would wait a deadline at every step for one that does not come, until the others have made as many steps."""
    await meet(lab)
    *others, alone = lab.members
    lab.cut([alone], others)
    await lab.until(lambda: alone.swaps[-1].partner is None)
    alone.node.gossip.partners.step += 400
    lab.heal([alone], others)
    ahead = len(alone.swaps)
    await lab.until(lambda: any(swap.partner is not None for swap in alone.swaps[ahead:]), limit=60.0)
    steps = [member.node.gossip.step for member in lab.members]
    assert max(steps) - min(steps) <= AHEAD
    paired = [swap.step for swap in together(alone)]
    assert len(paired) == len(set(paired)), "no number is shared twice"


@scene(lambda: patient(lease=6.0), peers=4, make_model=tiny_model)
async def test_a_peer_cut_off_from_all_does_not_go_back_on_what_it_remembers_of_them(lab):
    await swap_on(lab, 4)
    *others, alone = lab.members
    lab.cut([alone], others)
    begun = len(alone.swaps)
    await lab.until(lambda: len(alone.swaps) >= begun + 2 * AHEAD, limit=600.0)
    steps = [swap.step for swap in alone.swaps[begun:]]
    assert steps == sorted(set(steps))


@scene(lambda: small_terms("noloco").changed(outer={"fragments": 2}), peers=2)
async def test_a_jump_never_swaps_one_fragment_for_another(lab):
    await meet(lab)
    begun = len(lab.members[0].swaps)
    await lab.until(lambda: len(lab.members[0].swaps) > begun)
    lab.members[0].node.gossip.partners.step += 40  # between two steps; the other makes one more, and then jumps by 39
    await meet(lab, 4, limit=100)
    for member in lab.members:
        numels = [fragment.numel for fragment in member.node.start.schema.fragments]
        assert all(swap.after_N.numel() == numels[swap.step % 2] for swap in member.swaps)


@scene(lambda: small_terms("late_merge").changed(outer={"first": 0.2, "growth": 12}), peers=2, make_model=tiny_model)
async def test_pairs_meet_in_the_steps_that_the_method_names_and_in_no_other_and_say_so(lab):
    method = make_outer("late_merge", lab.manifest.outer.hyper)
    begun = max(len(member.swaps) for member in lab.members) + 2
    await lab.until(lambda: all(len(member.swaps) >= begun + 14 for member in lab.members))
    for member in lab.members:
        swaps = member.swaps[begun:]
        assert [swap.matched for swap in swaps] == [method.meets(swap.step) for swap in swaps]
        told = {swap.step: swap.partner is not None for swap in swaps}
        assert told == {step: method.meets(step) for step in told}
        assert 0 < sum(told.values()) < len(told)


# ---- what both take over ----


@scene("noloco", peers=2)
async def test_a_pair_applies_the_same_mean_and_conserves_the_average(lab):
    for member in lab.members:
        member.pull = 0.0
    a, b = (member.node.replica for member in lab.members)
    await swap_on(lab, 2)
    a.anchors[0], b.anchors[0] = lab.members[0].target(0), lab.members[1].target(0)
    for replica in (a, b):
        replica.states[0] = {"momentum": torch.zeros_like(replica.anchors[0])}
    before = (a.anchors[0] + b.anchors[0]) / 2
    await swap_on(lab, 3)
    await lab.until(lambda: len(lab.members[0].swaps) == len(lab.members[1].swaps))
    torch.testing.assert_close((a.anchors[0] + b.anchors[0]) / 2, before, rtol=1e-4, atol=1e-4)


ONE_VECTOR = ("gasloc", "a2cid2", "ad_psgd", "variance_corrected")


@pytest.mark.parametrize(
    ("preset", "near"),
    [
        ("noloco", 0.5),
        ("ad_psgd", 0.2),
        pytest.param("gasloc", 0.2, marks=pytest.mark.long),
        pytest.param("a2cid2", 0.2, marks=pytest.mark.long),
        pytest.param("variance_corrected", 0.2, marks=pytest.mark.long),
    ],
)
@scene(peers=3, make_model=tiny_model)
async def test_three_peers_of_whom_one_dies_go_on_agree_better_and_end_with_one_model(lab, preset, near):
    await meet(lab, 4)
    lab.members[2].kill()
    await lab.all_members()
    left = lab.alive()
    await meet(lab, 25)
    anchors = [member.node.replica.anchors[0] for member in left]
    mean, goal = sum(anchors) / 2, sum(member.target(0) for member in left) / 2
    assert (mean - goal).norm() < near * goal.norm()  # a correction of variance spreads goals, too
    late = max(swap.disagreement for member in left for swap in together(member)[-5:])
    early = max(swap.disagreement for member in left for swap in together(member)[:3])
    assert late < (early if preset in ONE_VECTOR else 2.0)
    for member in left:
        member.idle = True
    await lab.until(lambda: all(member.node.driver.head.final for member in left))
    assert len({member.node.replica.digest for member in left}) == 1
    assert len(left[0].log[-1].record.frames) == 2


def test_one_vector_is_half_the_bytes_of_noloco_in_a_real_swap():
    sizes = {"gasloc": set(), "noloco": set()}

    async def script(lab):
        seen = sizes[lab.manifest.outer.method]
        await lab.start(2)
        partners = lab.members[0].node.gossip.partners
        take = partners.take

        def noted(frame, decoded, head):
            seen.add((len(frame.body), len(decoded)))
            return take(frame, decoded, head)

        partners.take = noted
        await meet(lab, 4)

    for preset in sizes:
        run_in_lab(small_terms(preset), script)
    assert {numel for _, numel in sizes["noloco"]} == {2 * numel for _, numel in sizes["gasloc"]}
    assert max(nbytes for nbytes, _ in sizes["gasloc"]) < 0.6 * min(nbytes for nbytes, _ in sizes["noloco"])


def test_a_preset_of_a_method_that_owes_nothing_has_no_feedback():
    assert all(preset_manifest(method).compressor.feedback == "none" for method in ONE_VECTOR)


# ---- what is told ----


def told_alike(one, other):
    """Of every step that both have taken: whether both took it with each other, or both alone."""
    with_partner = [{swap.step: swap.partner is not None for swap in member.swaps} for member in (one, other)]
    both = with_partner[0].keys() & with_partner[1].keys()
    return [with_partner[0][step] == with_partner[1][step] for step in sorted(both)]


def leader_and_follower(lab):
    return sorted(lab.members, key=lambda member: member.signer.peer)


@pytest.mark.parametrize("wide", [0, 1 << 20])
@scene(lambda: patient(deadline_ceiling=60.0), make_model=tiny_model)
async def test_a_thin_uplink_makes_no_pair_by_half(lab, monkeypatch, wide):
    """The commit stood behind the frame's last megabyte for longer than it was asked about: one took the step alone."""
    monkeypatch.setattr(gossip, "WIDE", wide)
    lab.network.weights = {protocol: Weight(1000.0) for protocol in (broadcast.PUSH, LANE)}
    await lab.start(2)
    one, other = leader_and_follower(lab)
    lab.network.set_uplink(one.signer.peer, 115_000.0)  # a megabyte, as much as is under way, takes 9 s
    await lab.until(lambda: all(len(member.swaps) >= 5 for member in (one, other)), limit=900.0)
    assert all(told_alike(one, other))
    assert any(swap.partner is not None for swap in one.swaps[2:])


class _Deaf:
    """A stream whose answer never comes, as on a connection that broke behind the question."""

    def __init__(self, stream):
        self.stream, self.peer = stream, stream.peer
        self.send, self.aclose = stream.send, stream.aclose

    async def receive_exactly(self, nbytes, on_bytes=None):
        await anyio.sleep_forever()


def deafen(member, every: int) -> None:
    """Of its questions about pairs each ``every``-th, the first one first, has no answer."""
    whole, count = member.transport.open, itertools.count()

    async def deaf(peer, protocol):
        stream = await whole(peer, protocol)
        return _Deaf(stream) if protocol == PAIR and next(count) % every == 0 else stream

    member.transport.open = deaf


@scene("noloco", peers=2, make_model=tiny_model)
async def test_an_answer_that_is_lost_is_asked_for_again_while_the_first_question_hangs(lab):
    leader, follower = leader_and_follower(lab)
    deafen(leader, every=2)
    begun = len(leader.swaps) + 1
    await lab.until(lambda: all(len(member.swaps) >= begun + 4 for member in lab.members))
    assert all(told_alike(leader, follower)[begun:])
    assert all(swap.partner is not None for swap in leader.swaps[begun:])
    assert not leader.happened("undecided")


@scene("noloco", peers=2, make_model=tiny_model)
async def test_a_leader_that_never_hears_whether_the_pair_was_made_says_so(lab):
    """It cannot be known (Gray 1978); that it is not known is told, where only the disagreement had shown it."""
    leader, follower = leader_and_follower(lab)
    deafen(leader, every=1)
    await lab.until(lambda: leader.happened("undecided"), limit=60.0)
    (fields, *_) = leader.happened("undecided")
    assert fields == {"round": fields["round"], "peer": peer_name(follower.signer.peer), "seconds": UNDECIDED}


@scene("noloco", peers=2, make_model=tiny_model)
async def test_a_partner_that_dropped_the_frame_says_no_instead_of_wait(lab):
    """It was too far ahead when it came. Then both waited out the eight seconds for which a commit is asked about."""
    leader, follower = leader_and_follower(lab)
    follower.node.gossip.partners.take = lambda frame, decoded, head: None
    counts = [len(member.swaps) for member in (leader, follower)]
    began = anyio.current_time()
    await lab.until(lambda: all(len(m.swaps) > n + 3 for m, n in zip((leader, follower), counts, strict=True)))
    assert anyio.current_time() - began < 3 * UNDECIDED
    assert all(told_alike(leader, follower)[max(counts) + 1 :])


# ---- how long a step takes ----

LATENCY = 0.25  # s, one way


def steps_of(lab):
    """Of every step that both took together: the seconds from when the later one began to when the later one ended."""
    taken: dict[int, list[tuple[float, float]]] = {}

    def watch(member):
        exchange = member.node.gossip.exchange

        async def timed(mine):
            began = anyio.current_time()
            outcome = await exchange(mine)
            if outcome.partner is not None:
                taken.setdefault(outcome.step, []).append((began, anyio.current_time()))
            return outcome

        member.node.gossip.exchange = timed

    for member in lab.members:
        watch(member)
    return lambda: [
        max(end for _, end in both) - max(begin for begin, _ in both) for both in taken.values() if len(both) == 2
    ]


@scene(patient, peers=2, make_model=tiny_model)
async def test_a_step_of_a_pair_takes_eight_trips_of_which_four_open_streams(lab):
    """Open, frame, "I have it", open, "do you commit", "yes": a stream of this network takes a trip both ways to open,
    libp2p's takes none where it is known what the other speaks.
    """
    for one, other in itertools.permutations(lab.members, 2):
        lab.network.set_link(one.signer.peer, other.signer.peer, latency=LATENCY)
    seconds = steps_of(lab)
    await lab.until(lambda: len(seconds()) >= 4)
    assert max(seconds()[1:]) == pytest.approx(8 * LATENCY, abs=0.01)


@pytest.mark.parametrize("wide", [0, 1 << 20])
@scene(lambda: patient(deadline_ceiling=60.0))
async def test_both_frames_of_a_pair_are_on_their_way_at_once(lab, monkeypatch, wide):
    """One after the other they would take twice as long."""
    rate, frame = 20_000.0, []
    monkeypatch.setattr(gossip, "WIDE", wide)
    monkeypatch.setattr(partners, "LANE_PIECE", 4096)
    lab.network.weights = {protocol: Weight(5.0) for protocol in (broadcast.PUSH, LANE)}
    await lab.start(2)
    monkeypatch.setattr(Partners, "take", lambda *given, take=Partners.take: frame.append(given[1]) or take(*given))
    for member in lab.members:
        lab.network.set_uplink(member.signer.peer, rate)
    seconds = steps_of(lab)
    await lab.until(lambda: len(seconds()) >= 4, limit=900.0)
    alone = 5.0 * frame[-1].nbytes / rate
    assert alone < max(seconds()[1:]) < 1.3 * alone + 8 * 0.02


# ---- a frame on several streams ----


def swap_of(signer, step: int, body: bytes = b"", kind: FrameKind = FrameKind.SWAP) -> Frame:
    where = {"epoch": 1, "round": step, "fragment": 0, "part": 0, "parts": 1, "plan": 0, "base": bytes(32)}
    header = Header(kind=kind, run=bytes(32), sender=signer.peer, steps=1, tokens=1, **where)
    return seal(header, body, signer)


ONE, OTHER = signer_of(1), signer_of(2)
LONG = bytes(range(256)) * (5 << 8)  # more than two pieces


def test_a_frame_is_put_together_from_its_pieces_in_any_order_and_once():
    frame, lanes = swap_of(ONE, 3, LONG), Lanes(lambda header: len(LONG))
    pieces = list(cut(frame))
    assert len(pieces) > 2
    assert max(map(len, pieces)) <= LANE_NBYTES
    for order in (pieces, pieces[::-1]):
        assert [lanes.add(piece, ONE.peer) for piece in order] == [None] * (len(pieces) - 1) + [frame.data]


def test_of_a_peer_that_goes_on_to_the_next_step_the_frame_of_the_last_one_is_forgotten():
    lanes = Lanes(lambda header: len(LONG))
    steps = [list(cut(swap_of(ONE, step, LONG))) for step in range(100)]
    for pieces in steps:
        assert lanes.add(pieces[0], ONE.peer) is None
    assert len(lanes._coming) == 1
    lanes.forget(98)
    assert len(lanes._coming) == 1
    lanes.forget(99)
    assert not lanes._coming
    assert [lanes.add(piece, ONE.peer) for piece in steps[0][1:]] == [None] * (len(steps[0]) - 1)


@pytest.mark.parametrize(
    ("frame", "peer", "most"),
    [
        (swap_of(ONE, 3, LONG), OTHER.peer, len(LONG)),  # passed on
        (swap_of(ONE, 3, LONG, FrameKind.CONTRIBUTION), ONE.peer, len(LONG)),
        (swap_of(ONE, 3, LONG), ONE.peer, len(LONG) - 1),
        (Frame(swap_of(ONE, 3).header, swap_of(OTHER, 3, LONG).data), ONE.peer, len(LONG)),
    ],
)
def test_nothing_is_kept_of_a_piece_that_is_no_swap_of_who_sends_it_or_too_long(frame, peer, most):
    lanes = Lanes(lambda header: most)
    with pytest.raises(PayloadError):
        lanes.add(next(cut(frame)), peer)
    assert not lanes._coming


@scene("noloco", peers=2)
async def test_nothing_is_kept_of_a_piece_of_a_stranger_even_of_one_that_is_let_in(lab):
    await meet(lab)
    swapping = lab.members[0].node.gossip.swapping
    swapping.driver.frames.inbox.admits = lambda newcomer: True
    stranger = signer_of(77)
    header = replace(swap_of(stranger, 3).header, run=swapping.state.head.run)
    with pytest.raises(PayloadError, match="no member"):
        swapping._lanes.add(next(cut(seal(header, b"few", stranger))), stranger.peer)
    assert not swapping._lanes._coming


@scene("noloco", peers=2)
async def test_a_frame_that_breaks_off_on_its_streams_costs_the_step_and_not_the_next_one(lab, monkeypatch):
    monkeypatch.setattr(gossip, "WIDE", 0)
    monkeypatch.setattr(partners, "LANE_PIECE", 1 << 12)
    await meet(lab)
    one, other = lab.members
    add = other.node.gossip.swapping._lanes.add
    left = itertools.count()

    def break_off(data, peer):
        if next(left) == 3:
            raise PayloadError("a piece that did not come as it was sent")
        return add(data, peer)

    other.node.gossip.swapping._lanes.add = break_off
    begun = len(one.swaps)
    await meet(lab, 3)
    assert any(swap.partner is None for swap in one.swaps[begun:])
    assert all(told_alike(one, other))


# ---- how long a peer waits for its partner of a step ----

A, B = b"a" * 32, b"b" * 32
FLOOR, CEILING = 2.0, 60.0


def waits_after(delays: list[float]) -> float:
    """The wait at the end of steps whose partners came so many seconds after this peer."""
    found, now = Punctuality(FLOOR, CEILING), 0.0
    for step, delay in enumerate(delays):
        now += 100.0
        if delay < 0:
            found.came(step, A, now + delay, is_over=False)
        found.began(step, A, now)
        if delay >= 0:
            found.came(step, A, now + delay, is_over=delay > FLOOR)
    return found.patience()


@pytest.mark.parametrize(
    ("delays", "wait"),
    [
        ([], CEILING),  # until something is known
        ([0.0] * 3, CEILING),
        ([12.0] * 4, 12.0 + FLOOR),  # counted by pairs that were made alone, it stayed at the floor, as did the pairs
        ([-9.0] * 6, FLOOR),
        ([-4.0, 4.0, -3.0, 3.0], 6.0 * 3.5),  # the spread counts on both sides: else half of the delays would be 0
        ([90.0] * 8, CEILING),
    ],
)
def test_a_partner_that_came_late_is_waited_for_next_time_within_a_floor_and_a_ceiling(delays, wait):
    assert waits_after(delays) == wait


def test_only_the_partner_of_a_step_is_late_for_it_and_once():
    found = Punctuality(FLOOR, CEILING)
    for step in range(20):
        found.began(step, A, 100.0 * step)
        found.came(step, B, 100.0 * step + 50.0, is_over=True)
        found.came(step, A, 100.0 * step + 1.0, is_over=True)
        found.came(step, A, 100.0 * step + 59.0, is_over=True)
    assert found.patience() == 1.0 + FLOOR


def test_what_is_kept_of_steps_is_bounded():
    found = Punctuality(FLOOR, CEILING)
    for step in range(1000):
        found.began(step, A, float(step))
        found.came(step + 1, B, float(step), is_over=False)
        found.came(step - 500, B, float(step), is_over=True)
    assert len(found._begun) <= LATEST
    assert len(found._early) <= 2
