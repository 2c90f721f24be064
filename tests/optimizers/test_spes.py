"""SPES on a small mixture of experts: who owns what, what an owner says counts, and the warm-up by merging."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from decentral.optimizers import Contributor, RoundInfo
from decentral.optimizers.owners import experts_of, merge_owners, owns, pack_places, read_places
from decentral.optimizers.spes import SPES
from tests.kit.blocks import InTurns, check_alike
from tests.kit.nodes import Lab
from tests.optimizers.owning import EXPERTS, LAYOUT, mixture, said

NUMEL = sum(parameter.numel() for parameter in mixture().parameters())


def randn(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def info(*summaries: bytes, step: int = 0) -> RoundInfo:
    told = tuple(Contributor(bytes([n]) * 32, summary=one) for n, one in enumerate(summaries))
    return RoundInfo(step, told, (1.0,) * len(told), tuple(LAYOUT.values()), tuple(LAYOUT))


def of_expert(expert: int) -> Tensor:
    """Where it is, as booleans."""
    is_there_N = torch.zeros(NUMEL, dtype=torch.bool)
    for experts in experts_of(LAYOUT).values():
        for start, stop in experts[expert]:
            is_there_N[start:stop] = True
    return is_there_N


def changes(owners: list[int]) -> list[Tensor]:
    """What peers send whose places are ``owners`` of three: zeros for the experts of the others."""
    rows = []
    for n, place in enumerate(owners):
        row_N = randn(n)
        for expert in range(EXPERTS):
            if expert % 3 != place:
                row_N[of_expert(expert)] = 0.0
        rows.append(row_N)
    return rows


def test_experts_are_found_by_name_in_lists_of_modules_and_in_one_tensor_of_all():
    layers = experts_of(LAYOUT)
    assert list(layers) == ["layers.0", "layers.1"]
    assert all(sorted(experts) == list(range(EXPERTS)) for experts in layers.values())
    assert sum(int(of_expert(expert).sum()) for expert in range(EXPERTS)) == 2 * EXPERTS * 48
    fused = experts_of({"a.weight": (3,), "b.experts.gate_up_proj": (4, 5, 2), "b.experts.bias": (7,)})
    assert fused == {"b": {e: [(3 + 10 * e, 13 + 10 * e)] for e in range(4)}}
    assert experts_of({"experts": (4, 2), "my_experts.0.w": (3,)}) == {}


def test_an_expert_is_its_owners_and_the_shared_parts_are_everybodys():
    rows, anchor = changes([0, 1, 2]), randn(9)
    received = {"change": torch.stack(rows).mean(0)}
    after, _ = SPES().outer_step(anchor, received, {}, info(said(0, 3), said(1, 3), said(2, 3)))
    shared_N = torch.ones(NUMEL, dtype=torch.bool)
    for expert in range(EXPERTS):
        mine_N = of_expert(expert)
        shared_N &= ~mine_N
        torch.testing.assert_close(after[mine_N], (anchor - rows[expert % 3])[mine_N], rtol=0, atol=1e-6)
    torch.testing.assert_close(after[shared_N], (anchor - torch.stack(rows).mean(0))[shared_N], rtol=0, atol=1e-6)


def test_experts_whose_owner_did_not_come_stay_and_those_of_two_are_averaged():
    rows, anchor = changes([0, 0]), randn(9)
    after, _ = SPES().outer_step(anchor, {"change": torch.stack(rows).mean(0)}, {}, info(said(0, 3), said(0, 3)))
    for expert in range(EXPERTS):
        mine_N = of_expert(expert)
        want_N = anchor - torch.stack(rows).mean(0) if expert % 3 == 0 else anchor
        torch.testing.assert_close(after[mine_N], want_N[mine_N], rtol=0, atol=1e-6)


def test_one_peer_alone_ends_where_it_trained_to():
    anchor, local = randn(9).round(decimals=2), randn(8)
    after, _ = SPES(merge_rate=0.0).outer_step(anchor, {"change": anchor - local}, {}, info(said(0, 1)))
    assert torch.equal(after, anchor - (anchor - local))


@pytest.mark.parametrize("summary", [b"", said(3, 3), said(0, 0), said(9, 2), bytes(64), b"\x00"])
def test_who_names_no_place_counts_nothing(summary: bytes):
    told = info(said(0, 2), summary).contributors
    assert SPES().weights(told, (1.0, 5.0), {}) == [1.0, 0.0]


def test_merging_moves_an_expert_towards_its_four_nearest_by_the_cosine_of_the_first_tensor():
    layers, anchor = experts_of(LAYOUT), randn(3)
    after = merge_owners(anchor, layers, 0.1)
    for experts in layers.values():
        whole = {e: torch.cat([anchor[a:b] for a, b in spans]).double() for e, spans in experts.items()}
        first = {e: one[:24] / one[:24].norm() for e, one in whole.items()}
        for e, spans in experts.items():
            near = sorted((o for o in whole if o != e), key=lambda o: -float(first[e] @ first[o]))[:4]
            wanted = whole[e] + 0.1 * (torch.stack([whole[o] for o in near]).mean(0) - whole[e])
            torch.testing.assert_close(torch.cat([after[a:b] for a, b in spans]).double(), wanted, rtol=0, atol=1e-6)
    untouched_N = ~sum((of_expert(e) for e in range(EXPERTS)), torch.zeros(NUMEL, dtype=torch.bool))
    assert torch.equal(after[untouched_N], anchor[untouched_N])


def test_of_more_than_four_others_the_farthest_gives_nothing():
    layout = {f"experts.{e}.w": (2,) for e in range(7)}
    angles = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 3.0, 3.1])
    anchor = torch.stack([angles.cos(), angles.sin()], 1).flatten()
    after = merge_owners(anchor, experts_of({f"m.{name}": shape for name, shape in layout.items()}), 1.0)
    torch.testing.assert_close(after[:2], anchor.view(7, 2)[1:5].mean(0))


def test_the_warm_up_comes_every_so_many_rounds_weaker_each_time_and_ends():
    method, anchor = SPES(merge_rate=0.08, merge_every=3, merge_rounds=6), randn(3)
    moved = []
    for step in range(12):
        after, _ = method.outer_step(anchor, {"change": torch.zeros(NUMEL)}, {}, info(said(0, 1), step=step))
        moved.append(float((after - anchor).norm()))
    assert [one > 0 for one in moved] == [False, False, True, False, False, True] + [False] * 6
    assert moved[5] == pytest.approx(moved[2] / 4, rel=1e-3)  # 1 - 5/6 of it, where it was 1 - 2/6
    still, _ = SPES(merge_rate=0.0, merge_every=1).outer_step(
        anchor, {"change": torch.zeros(NUMEL)}, {}, info(said(0, 1))
    )
    assert torch.equal(still, anchor)


def test_three_peers_of_a_swarm_train_their_own_experts_and_hold_the_same(run_lab: Any, terms: Any) -> None:
    """Real nodes: after the first round each expert has one owner, and only its owner's copy moves between rounds."""

    async def script(lab: Lab) -> None:
        for _ in range(3):
            lab.add(kind=InTurns)
        await lab.all_members()
        await lab.rounds(6)
        for member in lab.members:
            member.idle = True
        await lab.until(lambda: all(m.node.driver.state.pending is None for m in lab.members))
        await lab.until(lambda: len({m.node.driver.head.hash for m in lab.members}) == 1)
        check_alike(lab.members)
        await lab.until(lambda: all(m.is_up_to_date for m in lab.members))
        places = {tuple(member.schedule.live.own(0)["place"].tolist()) for member in lab.members}
        assert places == {(0.0, 3.0), (1.0, 3.0), (2.0, 3.0)}
        for member in lab.members:
            before_N = member.model.read(0)
            member.step()
            moved_N = member.model.read(0) != before_N
            place = int(member.schedule.live.own(0)["place"][0])
            assert [bool(moved_N[of_expert(e)].any()) for e in range(EXPERTS)] == [
                e % 3 == place for e in range(EXPERTS)
            ]

    manifest = terms("spes").changed(inner={"steps": 4}, compressor={"chain": "none", "feedback": "none"})
    run_lab(manifest, script, make_model=mixture)


@pytest.mark.parametrize(("num_experts", "left"), [(8, [1, 4]), (400, [*range(1, 400, 3)]), (400, [*range(400)])])
def test_experts_in_which_something_is_left_are_named_and_others_only_where_room_is_short(
    num_experts: int, left: list[int]
):
    """Place 0 of 3 now, 1 of 3 before."""
    named = read_places(Contributor(b"", summary=pack_places((0, 3), (1, 3), left, num_experts)))
    assert all(owns(named, e) for e in left)
    if len(left) < 16:
        assert [e for e in range(num_experts) if owns(named, e) and e % 3] == left
