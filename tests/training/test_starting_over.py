from __future__ import annotations

import torch

from decentral.replica.replica import OWED
from decentral.training.outer_loop import anchors_without_debt, forget_non_finite


def test_a_peer_that_starts_over_drops_its_debt_and_keeps_what_it_owes_as_an_owner(run_lab, terms):
    async def script(lab):
        member = lab.add()
        await lab.rounds(1)
        member.idle = True
        node = member.node
        await lab.until(lambda: node.driver.pending is None)
        owed_N = torch.ones(lab.schema.fragments[0].numel)
        node.replica.feedback[0] = {"debt": owed_N * 2, OWED: owed_N}
        assert await anchors_without_debt(node, bytes(32), [0]) is None, "the chain is elsewhere"
        assert "debt" in node.replica.feedback[0]
        standing = await anchors_without_debt(node, node.driver.head.hash, [0])
        assert standing is not None
        assert list(node.replica.feedback[0]) == [OWED]

    run_lab(terms("sparseloco"), script)


def test_only_moments_that_are_not_finite_are_forgotten():
    whole, poisoned = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = torch.optim.AdamW([whole, poisoned])
    (whole.sum() + poisoned.sum()).backward()
    optimizer.step()
    optimizer.state[poisoned]["exp_avg"][0] = float("nan")
    assert forget_non_finite(optimizer) == 1
    assert list(optimizer.state) == [whole]
    optimizer.step()
