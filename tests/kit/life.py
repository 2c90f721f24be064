"""A peer's life as its disk sees it: vote, commit, apply, checkpoint, until the power or the process goes.

What a call made durable is acknowledged right after it; ``check`` then asks a disk, whatever happened to it, for
everything that was acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from decentral.consensus.chain import Head
from decentral.consensus.paxos import Acceptor
from decentral.node.durable_store import DurableStore
from decentral.replica.replica import Replica
from decentral.state.durable import DISK, Disk
from tests.kit.history import ME, RUN, History

Word = Literal["vote", "commit", "checkpoint"]
Tell = Callable[[Word, int], None]
CHECKPOINT_EVERY = 2  # rounds


@dataclass(slots=True)
class Acknowledged:
    """The newest round of each kind that the disk said is durable; -1: none."""

    vote: int = -1
    commit: int = 0
    checkpoint: int = -1

    def hear(self, word: Word, round_: int) -> None:
        """Take a call's return for a promise."""
        setattr(self, word, round_)


class Life:
    """One peer at work on a folder, from its start or restart on."""

    def __init__(
        self,
        history: History,
        folder: Path,
        tell: Tell,
        disk: Disk = DISK,
        checkpoint_every: int = CHECKPOINT_EVERY,
    ) -> None:
        """Begin, or resume what the folder holds. Raises DiskError."""
        self.history, self.tell, self.checkpoint_every = history, tell, checkpoint_every
        self.store = DurableStore(folder, disk=disk)
        self.replica: Replica = history.replica()
        self.head: Head = history.heads[0]
        found = self.store.load(RUN)
        self.resumed_from = -1 if found is None else found.head.round
        self.passed_over = () if found is None else found.passed_over
        self.acceptor = self._voted()
        if found is not None:
            self.replica.load(found.tensors)
            self.head, _ = self.store.replay(found.head, self.replica, ME)

    def _voted(self) -> Acceptor | None:
        blob = self.store.acceptor.read()
        return None if blob is None else Acceptor.from_bytes(blob)

    def save(self) -> None:
        """Write a checkpoint of where it stands."""
        self.store.save(self.head, self.replica.shared_tensors(), {})
        self.tell("checkpoint", self.head.round)

    def go_on(self, last: int) -> None:
        """Live through the rounds up to ``last``. Raises DiskError."""
        if self.resumed_from < 0:
            self.save()
        while self.head.round < last:
            self.one_round()

    def one_round(self) -> None:
        """Vote, learn of the commit, apply it."""
        number = self.head.round + 1
        commit, frames = self.history.commits[number - 1], self.history.frames[number - 1]
        self.vote(number)
        self.tell("vote", number)
        self.store.append(commit, frames)
        self.tell("commit", number)
        self.head, _ = self.store.replay(self.head, self.replica, ME)
        assert self.head == self.history.heads[number]
        if number % self.checkpoint_every == 0:
            self.save()

    def vote(self, number: int) -> None:
        """Promise ballot 1 and accept in it, unless that was done before a restart."""
        if self.acceptor == vote_in(self.history, number):
            return
        for step in (promise_in(number), vote_in(self.history, number)):
            self.store.acceptor.write(step.to_bytes())

    def close(self) -> None:
        """Give the folder back."""
        self.store.close()


def promise_in(number: int) -> Acceptor:
    """What the peer promises in a round."""
    promised = Acceptor(number).promise(1)
    assert promised is not None
    return promised


def vote_in(history: History, number: int) -> Acceptor:
    """What the peer accepts in a round."""
    accepted = promise_in(number).accept(1, history.commits[number - 1].record, bytes(64))
    assert accepted is not None
    return accepted


@dataclass(frozen=True, slots=True)
class Found:
    """What a restart finds."""

    checkpoint: int  # its round, -1 for none
    passed_over: tuple[tuple[str, str], ...]  # damaged checkpoints that are newer
    round: int  # where the journal leads
    equal: bool  # head and bits are those of that round
    voted: Acceptor

    def faults(self, history: History, promised: Acknowledged) -> list[str]:
        """What of this breaks a promise."""
        faults = []
        if self.checkpoint < promised.checkpoint or self.passed_over:
            faults.append(f"checkpoint of round {self.checkpoint} after {promised.checkpoint}: {self.passed_over}")
        if self.round < promised.commit or not self.equal:
            faults.append(f"resumed at round {self.round} after {promised.commit}, equal: {self.equal}")
        forgot = self.voted.round == promised.vote and self.voted != vote_in(history, promised.vote)
        if self.voted.round < promised.vote or forgot:
            faults.append(f"the vote of round {promised.vote} became {self.voted}")
        return faults


def found_in(history: History, folder: Path, disk: Disk = DISK) -> Found:
    """Restart in a folder. Raises DecentralError when that is refused."""
    life = Life(history, folder, lambda word, round_: None, disk)
    life.close()
    equal = life.head == history.heads[life.head.round] and life.replica.digest == life.head.anchor
    return Found(life.resumed_from, life.passed_over, life.head.round, equal, life.acceptor or Acceptor(0))


def goes_on(history: History, folder: Path, disk: Disk = DISK) -> bool:
    """Whether a restart writes on, and a restart after that stands where it ended."""
    life = Life(history, folder, lambda word, round_: None, disk)
    life.go_on(life.head.round + 1)
    life.close()
    again = Life(history, folder, lambda word, round_: None, disk)
    again.close()
    return again.head == life.head and again.replica.digest == life.replica.digest
