"""SIGKILL of the machines of one replica, each a real process, beside a whole peer."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from decentral.manifest import preset_manifest
from tests.faults.forks import Forks
from tests.kit.patience import until

LIMITS = {"deadline_floor": 1.0, "deadline_ceiling": 6.0, "lease": 6.0, "shrink_after": 8.0, "min_peers": 1}


class Machine:
    """A process, and what its folder and its lines say."""

    def __init__(self, forks: Forks, folder: Path, where: str, kind: str) -> None:
        self.folder = folder
        self.process = forks.start("stage", folder, where, kind)
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._errors: list[str] = []
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._drain)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._said.put(json.loads(line))

    def _drain(self) -> None:
        self._errors += self.process.stderr

    def began(self) -> str:
        until(lambda: not self._said.empty() or self.process.poll() is not None)
        assert not self._said.empty(), f"it did not begin: {self._errors[-5:]}"
        return str(self._said.get()["invite"])

    def events(self, *names: str) -> list[dict[str, Any]]:
        if not (path := self.folder / "events.jsonl").exists():
            return []
        whole_lines = path.read_text().rpartition("\n")[0].splitlines()
        return [event for event in map(json.loads, whole_lines) if event["event"] in names]

    @property
    def stage(self) -> dict[str, Any] | None:
        """Its group as it began, while it is in one."""
        last = self.events("group_formed", "group_over")[-1:]
        return last[0] if last and last[0]["event"] == "group_formed" else None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()


class Swarm:
    """A whole peer, and those that share."""

    def __init__(self, forks: Forks, folder: Path, skip: float | None) -> None:
        self._forks, self._folder = forks, folder
        terms = preset_manifest(
            "sparseloco",
            run={"rounds": 100_000, "salt": "stages"},
            model={"task": "custom"},
            inner={"steps": 6},
            outer={"fragments": 3, "layout": "stages", "skip": skip},
            swarm=LIMITS,
        )
        (manifest := folder / "run.toml").write_text(terms.to_toml())
        self.whole = Machine(forks, folder / "whole", str(manifest), "whole")
        self.machines, self._invite = [self.whole], self.whole.began()

    def share(self, count: int = 1) -> None:
        for _ in range(count):
            folder = self._folder / str(len(self.machines))
            self.machines.append(Machine(self._forks, folder, self._invite, "share"))

    def stages(self) -> list[Machine]:
        """The machines that are one replica now, first to last; none while they do not agree on who they are."""
        alive = [one for one in self.machines[1:] if one.process.poll() is None and one.stage is not None]
        alive.sort(key=lambda one: one.stage["stage"] if one.stage else 0)
        sizes = {1 + len(one.stage["peers"]) for one in alive if one.stage is not None}
        return alive if sizes == {len(alive)} else []

    def kill(self, place: int) -> None:
        """SIGKILL the machine of a stage of three, once all of it counts."""
        until(lambda: self.has_stages(3))
        self.count_again(2)
        self.stages()[place].kill()

    def has_stages(self, count: int) -> bool:
        return len(self.stages()) == count

    def count_again(self, count: int) -> None:
        """Wait until so many contribute to rounds that end from now on: in three neighbours each fragment has one."""
        since = len(self.whole.events("commit"))
        until(lambda: [len(row["contributors"]) for row in self.whole.events("commit")[since:]][-3:] == [count] * 3)

    def end(self) -> None:
        for machine in self.machines:
            machine.kill()

    def check(self) -> None:
        """The same anchors everywhere, and no round lost or made twice."""
        anchors = dict[int, str]()
        for machine in self.machines:
            rounds = [row["round"] for row in machine.events("commit")]
            for row in machine.events("commit"):
                assert anchors.setdefault(row["round"], row["anchor"]) == row["anchor"], f"round {row['round']} differs"
            assert rounds == sorted(set(rounds)), "a round was applied twice or out of order"
        steps = [row["outer_step"] for row in self.whole.events("commit")]
        assert steps == list(range(steps[0], steps[0] + len(steps))), "an outer step was lost"


@pytest.fixture
def swarm_of(tmp_path: Path, forks: Forks) -> Iterator[Callable[..., Swarm]]:
    made: list[Swarm] = []

    def make(skip: float | None = None) -> Swarm:
        made.append(Swarm(forks, tmp_path, skip))
        return made[-1]

    yield make
    for swarm in made:
        swarm.end()


@pytest.mark.long
def test_each_stage_in_turn_is_killed_and_a_spare_takes_its_place(swarm_of: Callable[..., Swarm]) -> None:
    swarm = swarm_of()
    swarm.share(4)
    for place in range(3):
        swarm.kill(place)
        swarm.share()
        swarm.count_again(2)
    swarm.end()
    swarm.check()


@pytest.mark.long
def test_without_a_spare_the_middle_stage_is_left_out_where_the_terms_allow_it_until_there_is_one(
    swarm_of: Callable[..., Swarm],
) -> None:
    swarm = swarm_of(skip=0.34)
    swarm.share(3)
    swarm.kill(1)
    until(lambda: swarm.has_stages(2))
    assert [one.stage["left_out"] for one in swarm.stages() if one.stage] == [[1], [1]]
    swarm.share()
    until(lambda: swarm.has_stages(3))
    assert [one.stage["left_out"] for one in swarm.stages() if one.stage] == [[], [], []]
    swarm.count_again(2)
    swarm.end()
    swarm.check()
