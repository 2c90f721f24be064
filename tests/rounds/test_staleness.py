"""What a contribution says of itself beside its frame: how old it is, and what its method adds."""

from __future__ import annotations

import torch

from decentral.consensus.chain import contributions
from decentral.replica.contribution import Contribution


def test_progress_that_is_too_old_is_not_offered_and_a_summary_is_in_the_record_of_every_peer(run_lab, terms):
    async def script(lab):
        member, other = lab.add(), lab.add()
        await lab.all_members()
        await lab.rounds(4)
        member.idle = other.idle = True
        drivers = [each.node.driver for each in (member, other)]
        await lab.until(lambda: all(d.pending is None and d.head.anchor is not None for d in drivers))
        driver, head, anchor_N = drivers[0], drivers[0].head, member.node.replica.anchors[0]

        def made(**said):
            learnt_N = torch.full_like(anchor_N, 0.01)
            return Contribution(0, driver.head.hash, anchor_N - learnt_N, learnt_N, 1, 1, **said)

        assert not await driver.contribute(made(begun_from=head.outer_step - 3))
        assert driver.pending is None
        assert await driver.contribute(made(summary=b"norm"))
        await lab.until(lambda: all(d.head.outer_step > head.outer_step for d in drivers))
        for each in drivers:
            (told,) = contributions(each.machine.state.recent[head.round + 1].record)
            assert (told.peer, told.based, told.summary) == (driver.me, head.outer_step, b"norm")

    run_lab(terms("sparseloco"), script)
