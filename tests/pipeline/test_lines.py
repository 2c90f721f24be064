"""Lines between stages: what crosses, once and in order, whatever happens to streams; and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.abc
import pytest
import torch

from decentral.errors import ConfigError, GroupBroken, PayloadError
from decentral.pipeline.boundary import ROUNDINGS
from decentral.pipeline.lines import Boundaries, Form, Forms, LoopBell, StageInbox, StageLines, ThreadBell
from decentral.pipeline.stage import Done
from decentral.pipeline.turns import Turn
from decentral.simulate.virtual_time import run_in_virtual_time
from decentral.training.swarm_side import run_blocking
from decentral.transport.memory import MemoryNetwork
from decentral.wire.groups import Body, BodyKind, GroupRecord
from decentral.wire.keys import PeerId
from tests.kit.nodes import signer_of
from tests.kit.patience import PATIENCE

SIGNERS = [signer_of(number) for number in range(3)]
PEERS = [signer.peer for signer in SIGNERS]
RECORD = GroupRecord(bytes(32), 7, tuple((peer, place, place + 1) for place, peer in enumerate(PEERS)), 4, 0)
STATES, TARGETS = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2])


def inbox_of(place: int) -> StageInbox:
    return StageInbox(RECORD, PEERS[place], forms_of(place), ThreadBell())


def forms_of(place: int) -> Forms:
    comes, goes = STATES if place else None, STATES if place < 2 else None
    return Forms.of(RECORD, comes, goes, TARGETS, dict.fromkeys(PEERS, 2))


def states(step: int = 0, micro: int = 0) -> Body:
    form = forms_of(0).goes
    assert form is not None
    return Body(BodyKind.STATES, RECORD.number, step, micro, form.write(STATES + step + 10 * micro))


def go_on() -> None:
    """Nothing ends the waiting."""


# ---- forms ----


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_come_out_as_the_rounding_has_them_in_their_dtype(rounding: Any, dtype: torch.dtype) -> None:
    values = torch.randn(3, 5, 70, generator=torch.Generator().manual_seed(1)).to(dtype)
    form = Form(tuple(values.shape), dtype, rounding)
    data = form.write(values)
    assert len(data) == form.nbytes
    read = form.read(data)
    assert read.dtype == dtype
    assert torch.equal(read, rounding.unpack(rounding.pack(values)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32])
def test_targets_come_out_as_they_were(dtype: torch.dtype) -> None:
    values = torch.arange(12).view(3, 4).to(dtype)
    form = Form((3, 4), dtype)
    assert torch.equal(form.read(form.write(values)), values)
    assert form.nbytes <= 48


def test_what_does_not_fit_is_refused_before_it_leaves() -> None:
    with pytest.raises(ConfigError, match=r"\(2, 2\) where"):
        Form((2, 3), torch.float32).write(torch.zeros(2, 2))
    with pytest.raises(ConfigError, match="beyond 32 bits"):
        Form((1,), torch.int64).write(torch.tensor([1 << 31]))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused_where_they_come_in(wrong: float) -> None:
    form = Form((2,), torch.float32, ROUNDINGS[0])
    with pytest.raises(PayloadError, match="not finite"):
        form.read(form.write(torch.tensor([1.0, wrong])))


# ---- what came ----


def test_a_body_is_taken_once_however_often_it_comes() -> None:
    inbox = inbox_of(1)
    inbox.put(PEERS[0], states())
    inbox.put(PEERS[0], states())
    assert run_blocking(inbox.take(BodyKind.STATES, PEERS[0], 0, go_on, 1.0)) == states().values
    inbox.put(PEERS[0], states(step=1))
    inbox.begin(1)
    inbox.put(PEERS[0], states())  # of a step that is over: sent again after a stream failed
    assert run_blocking(inbox.take(BodyKind.STATES, PEERS[0], 0, go_on, 1.0)) == states(step=1).values
    with pytest.raises(GroupBroken, match="sent nothing"):
        run_blocking(inbox.take(BodyKind.STATES, PEERS[0], 0, go_on, 0.3))


async def _post_nothing(peer: PeerId, body: bytes) -> None:
    """Nobody is there."""


@pytest.mark.parametrize("place", range(3))
def test_a_stage_takes_the_first_of_its_turns_for_which_all_is_here(place: int) -> None:
    inbox, forward, back = inbox_of(place), Turn(True, 1), Turn(False, 0)
    lines = StageLines(inbox, PEERS[place], forms_of(place), _post_nothing, go_on, 0.3)
    with pytest.raises(GroupBroken, match="sent nothing"):
        run_blocking(lines.first_here([forward, back] if place else [back]))
    inbox.why = ""
    if place == 2:
        form = forms_of(2).targets
        assert form is not None
        inbox.put(PEERS[0], Body(BodyKind.TARGETS, RECORD.number, 0, 0, form.write(TARGETS)))
    else:
        inbox.put(PEERS[place + 1], Body(BodyKind.GRADIENT, RECORD.number, 0, 0, states().values))
    assert run_blocking(lines.first_here([forward, back])) == (back if place else forward), "inputs are its own"
    if place:
        inbox.put(PEERS[place - 1], states(micro=1))
    assert run_blocking(lines.first_here([forward, back])) == forward


def test_no_more_is_held_than_two_steps_have() -> None:
    inbox = inbox_of(1)
    for step in range(2):
        for micro in range(RECORD.micro_batches):
            inbox.put(PEERS[0], states(step, micro))
    with pytest.raises(PayloadError, match="none of ours"):
        inbox.put(PEERS[0], states(2))
    assert len(inbox._held) == 2 * RECORD.micro_batches


def test_states_come_from_the_stage_before_and_from_nobody_else() -> None:
    with pytest.raises(PayloadError, match="not its to send"):
        inbox_of(1).put(PEERS[2], states())


def test_who_waits_hears_that_a_member_has_left() -> None:
    inbox, heard = inbox_of(1), list[str]()

    def wait() -> None:
        try:
            run_blocking(inbox.take(BodyKind.STATES, PEERS[0], 0, go_on, PATIENCE))
        except GroupBroken as error:
            heard.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    inbox.put(PEERS[2], Body(BodyKind.OVER, RECORD.number, 0, 0, b""))
    thread.join(PATIENCE)
    assert "has left the group" in heard[0]


def test_who_waits_is_asked_whether_to_go_on() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_blocking(inbox_of(1).take(BodyKind.STATES, PEERS[0], 0, stop, PATIENCE))


def test_own_gradients_that_are_not_finite_end_the_group_here_too() -> None:
    inbox = inbox_of(1)
    for peer in (PEERS[0], PEERS[2]):
        inbox.put(peer, Body(BodyKind.DONE, RECORD.number, 0, 0, Done(torch.tensor([1.0])).to_bytes()))
    lines = StageLines(inbox, PEERS[1], forms_of(1), _post_nothing, go_on, 1.0)
    with pytest.raises(GroupBroken, match="not finite"):
        run_blocking(lines.exchange(Done(torch.tensor([float("nan")]))))


def test_bodies_that_come_again_do_not_end_the_patience_with_another() -> None:
    inbox, rung = inbox_of(1), ThreadBell()
    inbox._bell = rung
    inbox.put(PEERS[0], states())
    assert run_blocking(rung.wait(0.0)) == 0.0
    inbox.put(PEERS[0], states())
    assert run_blocking(rung.wait(0.01)) == 0.01


def test_gradients_of_others_that_are_not_finite_end_the_group_before_anybody_steps() -> None:
    inbox, sent = inbox_of(1), list[PeerId]()
    for peer, norm in ((PEERS[0], 1.0), (PEERS[2], float("nan"))):
        done = Done(torch.tensor([norm]), 0.5)
        inbox.put(peer, Body(BodyKind.DONE, RECORD.number, 0, 0, done.to_bytes()))

    async def post(peer: PeerId, body: bytes) -> None:
        sent.append(peer)

    lines = StageLines(inbox, PEERS[1], forms_of(1), post, go_on, 1.0)
    with pytest.raises(GroupBroken, match="not finite"):
        run_blocking(lines.exchange(Done(torch.tensor([1.0]))))
    assert inbox.why


# ---- on streams ----


class Side:
    """The lines of a member, on a network in memory."""

    def __init__(self, network: MemoryNetwork, place: int) -> None:
        self.peer, self.inbox = PEERS[place], inbox_of(place)
        self.transport = network.transport(SIGNERS[place])
        self.boundaries = Boundaries(self.transport, gives_up=20.0)

    async def live(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with self.transport:
            self.transport.budget.prefer(PEERS)
            task_status.started()
            await anyio.sleep_forever()

    def held(self) -> list[int]:
        """The micro-batches whose states are here."""
        return sorted(micro for kind, _, _, micro in self.inbox._held if kind is BodyKind.STATES)


def in_virtual_time(script: Callable[[MemoryNetwork, Any, list[Side]], Awaitable[None]], sides: int = 2) -> None:
    async def main() -> None:
        network = MemoryNetwork(latency=0.02, bandwidth=1e6)
        async with anyio.create_task_group() as group:
            both = [Side(network, place) for place in range(sides)]
            for side in both:
                await group.start(side.live)
            await script(network, group, both)
            group.cancel_scope.cancel()

    run_in_virtual_time(main, seed=0)


async def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    with anyio.fail_after(seconds):
        while not holds():
            await anyio.sleep(0.05)


def test_bodies_cross_and_cross_again_when_a_stream_fails() -> None:
    async def script(network: MemoryNetwork, group: Any, sides: list[Side]) -> None:
        first, second = sides
        for side in sides:
            group.start_soon(side.boundaries.run, side.inbox)
        await anyio.sleep(0.1)
        await first.boundaries.post(second.peer, states(micro=0).to_bytes())
        await until(lambda: second.held() == [0])
        network.cut(first.peer, second.peer)
        await first.boundaries.post(second.peer, states(micro=1).to_bytes())
        await anyio.sleep(5)
        assert second.held() == [0]
        network.heal(first.peer, second.peer)
        await first.boundaries.post(second.peer, states(micro=2).to_bytes())
        await until(lambda: second.held() == [0, 1, 2])
        assert not first.inbox.why

    in_virtual_time(script)


def test_a_member_that_has_not_begun_is_waited_for_and_one_that_never_will_is_not() -> None:
    async def script(network: MemoryNetwork, group: Any, sides: list[Side]) -> None:
        first, second = sides
        second.boundaries.expect(RECORD)
        group.start_soon(first.boundaries.run, first.inbox)
        await anyio.sleep(0.1)
        await first.boundaries.post(second.peer, Body(BodyKind.READY, RECORD.number, 0, 0, b"").to_bytes())
        await anyio.sleep(5)
        assert not first.inbox.why
        second.boundaries.expect(None)
        await until(lambda: bool(first.inbox.why))
        assert "in this group no more" in first.inbox.why

    in_virtual_time(script)


def test_a_member_that_is_out_of_reach_for_a_lease_ends_the_group() -> None:
    async def script(network: MemoryNetwork, group: Any, sides: list[Side]) -> None:
        first, second = sides
        group.start_soon(first.boundaries.run, first.inbox)
        await anyio.sleep(0.1)
        network.kill(second.peer)
        await first.boundaries.post(second.peer, states().to_bytes())
        await anyio.sleep(10)
        assert not first.inbox.why
        await until(lambda: bool(first.inbox.why))
        assert "out of reach" in first.inbox.why

    in_virtual_time(script)


def test_who_waits_for_long_tells_all_for_whom_and_when_it_waits_no_more() -> None:
    async def script(network: MemoryNetwork, group: Any, sides: list[Side]) -> None:
        first, second, third = sides
        for side in sides:
            side.inbox._bell = LoopBell()
            group.start_soon(side.boundaries.run, side.inbox)

        async def step(step: int) -> None:
            second.inbox.begin(step)
            await second.inbox.take(BodyKind.STATES, first.peer, 0, go_on, PATIENCE)

        async def told(whom: Side, seconds: float) -> None:
            await until(lambda: all(side.inbox.waiting.get(second.peer) == whom.peer for side in sides), seconds)

        group.start_soon(step, 0)
        await anyio.sleep(1.2)
        assert not any(side.inbox.waiting for side in sides), "not for long yet"
        await told(first, 1.0)
        await first.boundaries.post(second.peer, states().to_bytes())
        await told(second, 2.0)
        for number in range(1, 8):  # it waits most of the time, and never for long
            group.start_soon(step, number)
            await anyio.sleep(1.2)
            await first.boundaries.post(second.peer, states(number).to_bytes())
            await until(lambda: second.inbox.waits[0] is None, 0.5)
            assert third.inbox.waiting == {second.peer: second.peer}

    in_virtual_time(script, sides=3)


def test_a_word_of_who_waits_is_no_news_for_who_waits_here() -> None:
    inbox, rung = inbox_of(1), ThreadBell()
    inbox._bell = rung
    inbox.put(PEERS[0], Body(BodyKind.WAITS, RECORD.number, 0, 0, b"\2"))
    assert inbox.waiting == {PEERS[0]: PEERS[2]}
    assert run_blocking(rung.wait(0.01)) == 0.01


def test_who_leaves_a_group_tells_the_others() -> None:
    async def script(network: MemoryNetwork, group: Any, sides: list[Side]) -> None:
        for side in sides:
            group.start_soon(side.boundaries.run, side.inbox)
        await anyio.sleep(0.1)
        sides[0].inbox.end("it leaves")
        await until(lambda: "has left the group" in sides[1].inbox.why, 5)

    in_virtual_time(script)


def test_a_stranger_sends_nothing_large_to_anybody() -> None:
    async def script(network: MemoryNetwork, group: Any, sides: list[Side]) -> None:
        first, second, stranger = sides
        record = GroupRecord(RECORD.run, 7, ((PEERS[0], 0, 1), (PEERS[1], 1, 2)), 4, 0)
        forms = Forms.of(record, STATES, None, TARGETS, dict.fromkeys(PEERS[:2], 2))
        group.start_soon(second.boundaries.run, StageInbox(record, second.peer, forms, LoopBell()))
        group.start_soon(stranger.boundaries.run, stranger.inbox)
        await anyio.sleep(0.1)
        await stranger.boundaries.post(second.peer, states().to_bytes())
        await anyio.sleep(5)
        assert second.transport.traffic.of(stranger.peer).received <= 3 * 64
        assert first.peer in second.boundaries._outboxes

    in_virtual_time(script, sides=3)
