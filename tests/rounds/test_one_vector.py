"""Gossip methods that send one vector, on real nodes: a kill, the last merge, and what crosses."""

from __future__ import annotations

import pytest

from decentral.manifest import preset_manifest
from decentral.optimizers import make_outer
from tests.kit.nodes import tiny_model

METHODS = ("gasloc", "a2cid2", "ad_psgd", "variance_corrected")


def together(member):
    return [swap for swap in member.swaps if swap.partner is not None]


@pytest.mark.parametrize("method", METHODS)
def test_three_peers_of_whom_one_dies_go_on_agree_better_and_end_with_one_model(run_lab, terms, method: str):
    async def script(lab):
        for _ in range(3):
            lab.add()
        await lab.all_members()
        await lab.until(lambda: all(len(together(member)) >= 4 for member in lab.members))
        lab.members[2].kill()
        await lab.all_members()
        left = lab.alive()
        counts = [len(together(member)) for member in left]
        await lab.until(lambda: all(len(together(m)) >= n + 25 for m, n in zip(left, counts, strict=True)))
        anchors = [member.node.replica.anchors[0] for member in left]
        mean, goal = sum(anchors) / 2, sum(member.target(0) for member in left) / 2
        assert (mean - goal).norm() < 0.2 * goal.norm()  # a correction of variance spreads goals, too
        late = [swap.disagreement for member in left for swap in together(member)[-5:]]
        assert max(late) < max(swap.disagreement for member in left for swap in together(member)[:3])
        for member in left:
            member.idle = True
        await lab.until(lambda: all(member.node.driver.head.final for member in left))
        assert len({member.node.replica.digest for member in left}) == 1

    run_lab(terms(method), script, make_model=tiny_model)


def test_one_vector_is_half_the_bytes_of_noloco_in_a_real_swap(run_lab, terms):
    sizes = {}
    for method in ("gasloc", "noloco"):
        seen = sizes[method] = set()

        async def script(lab, seen=seen):
            for _ in range(2):
                lab.add()
            await lab.all_members()
            partners = lab.members[0].node.gossip.partners
            take = partners.take

            def noted(frame, decoded, head):
                seen.add((len(frame.body), len(decoded)))
                return take(frame, decoded, head)

            partners.take = noted
            await lab.until(lambda: len(together(lab.members[0])) >= 4)

        run_lab(terms(method), script)
    assert {numel for _, numel in sizes["noloco"]} == {2 * numel for _, numel in sizes["gasloc"]}
    assert max(nbytes for nbytes, _ in sizes["gasloc"]) < 0.6 * min(nbytes for nbytes, _ in sizes["noloco"])


def test_pairs_meet_in_the_steps_that_the_method_names_and_in_no_other(run_lab, terms):
    manifest = terms("late_merge").changed(outer={"first": 0.2, "growth": 12})
    method = make_outer("late_merge", manifest.outer.hyper)

    async def script(lab):
        for _ in range(2):
            lab.add()
        await lab.all_members()
        one, other = lab.members
        begun = max(len(member.swaps) for member in lab.members) + 2
        await lab.until(lambda: all(len(member.swaps) >= begun + 14 for member in lab.members))
        for member in (one, other):
            told = {swap.step: swap.partner is not None for swap in member.swaps[begun:]}
            assert told == {step: method.meets(step) for step in told}
            assert 0 < sum(told.values()) < len(told)

    run_lab(manifest, script, make_model=tiny_model)


def test_a_preset_of_a_method_that_owes_nothing_has_no_feedback():
    assert all(preset_manifest(method).compressor.feedback == "none" for method in METHODS)
