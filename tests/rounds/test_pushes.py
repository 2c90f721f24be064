"""A frame that is still on its way when its round ends: sent on if the commit names it, else given up."""

from __future__ import annotations

from dataclasses import replace

import anyio

from decentral.dissemination import broadcast
from decentral.replica.contribution import header_after
from decentral.wire.frames import FrameKind, seal
from tests.kit.chains import START, A, record
from tests.kit.machines import ref
from tests.kit.nodes import signer_of


def test_frames_that_a_commit_passes_by_do_not_slow_the_next_round(run_lab, terms, monkeypatch):
    ended = []

    async def crawl(transport, peers, data, *how):
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(data)

    monkeypatch.setattr(broadcast, "push", crawl)

    async def script(lab):
        member = lab.add()
        member.idle = True
        await lab.until(lambda: member.node.driver.state.running)
        driver = member.node.driver
        header = header_after(replace(driver.head, anchor=bytes(32)), FrameKind.CONTRIBUTION, 0, driver.me)
        named, late, next_one = (
            seal(replace(header, round=round_, tokens=n), b"", signer_of(0)) for n, round_ in enumerate((5, 5, 6))
        )
        for frame in (named, late, next_one):
            lab.group.start_soon(driver.frames.pushes.push, frame, (A,))
        await anyio.sleep(1)
        frames = (ref(driver.me, named.hash),)
        driver.frames.pushes.end_round(replace(record(START, {A: 1}), round=5, frames=frames))
        await anyio.sleep(1)
        assert ended == [late.data]
        assert driver.frames.pushes.count == 2

    run_lab(terms("sparseloco"), script)
