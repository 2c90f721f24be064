"""A peer's durable store: its journal of commits with their frames, its vote, its checkpoints. None may be lost.

A commit is durable, frames first, before it is applied; a checkpoint makes the frames before it unnecessary. After
a crash the newest valid checkpoint is loaded and the journal replayed on top, to the very bits of the last commit.
A snapshot that was adopted is written before it is used: the journal alone does not lead from the last checkpoint to
the commits after it, and this peer's vote counts for those.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from decentral.consensus.chain import Head, Past, check_succession, contributions, moves_anchor, retrace
from decentral.consensus.paxos import Acceptor
from decentral.errors import DiskError, ManifestMismatch, PayloadError
from decentral.parameters import FrozenSpec
from decentral.replica.apply import outer_step
from decentral.replica.contents import is_of_sender
from decentral.replica.contribution import forget_sent
from decentral.replica.replica import Replica, is_feedback, owed_after
from decentral.rounds.local_state import Ledger
from decentral.state.checkpoint import keep_frozen, load_metas, load_newest, save
from decentral.state.durable import DISK, TEMPORARY, Disk, disk_errors
from decentral.state.journal import AcceptorFile, Journal
from decentral.state.tensor_file import Whole, as_it_is
from decentral.wire.frames import HEADER_NBYTES, Frame, parse
from decentral.wire.keys import PeerId
from decentral.wire.messages import Commit, Record, decode_kept, encode

KEPT_CHECKPOINTS = 3
FRAMES_AT_HAND = 1 << 28  # bytes of frames that a restarted peer reads for those behind it


@dataclass(frozen=True, slots=True)
class Resumed:
    """A checkpoint, or what was adopted since."""

    head: Head
    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    passed_over: tuple[tuple[str, str], ...]
    adopted: bool = False  # the live model is older than the anchor, and what of it the anchor holds is not known


class FrameFolder:
    """The frames of commits and of votes, a file each, from before they count until a checkpoint contains them."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder, self._disk = folder, disk
        self._kept: set[Path] = set()  # that this process wrote; what an earlier one wrote may be torn
        self.written = 0  # bytes, by this process

    def keep(self, record: Record, frames: Sequence[bytes]) -> None:
        """Make the frames of a record durable. Those of a vote are not written again for its commit."""
        with disk_errors(f"writing frames to {self._folder}"):
            self._disk.make_folders(self._folder)
            named = zip(record.frames, frames, strict=True)
            files = {self._path(record.round, ref.frame): data for ref, data in named}
            missing = {path: data for path, data in files.items() if path not in self._kept}
            self._disk.replace_files(self._folder, missing)
            self._kept.update(missing)
            self.written += sum(map(len, missing.values()))

    def read(self, round_: int, frame: bytes) -> Frame:
        """Read one. Raises PayloadError for a damaged one, OSError for one that is not here."""
        data = self._path(round_, frame).read_bytes()
        found = parse(data, lambda header: len(data) - HEADER_NBYTES)
        if found.hash != frame:
            raise PayloadError(f"stored frame of round {round_} is damaged; the swarm has it")
        return found

    def of(self, records: Sequence[Record]) -> tuple[Frame, ...]:
        """Return the frames that are here and whole, oldest first; the newest, when all are too many to hold."""
        found, nbytes = list[Frame](), 0
        for record in reversed(records):
            for ref in reversed(record.frames):
                with contextlib.suppress(PayloadError, OSError):
                    found.append(self.read(record.round, ref.frame))
                    nbytes += found[-1].nbytes
            if nbytes > FRAMES_AT_HAND:
                break
        return tuple(reversed(found))

    def sweep(self) -> None:
        """Remove frames that a crash left half-written."""
        for path in self._folder.glob(f"{TEMPORARY}*"):
            with contextlib.suppress(OSError):
                self._disk.remove(path)

    def drop(self, upto: int) -> None:
        """Remove those of rounds up to ``upto``. None that stays is a failure: the next checkpoint tries again."""
        for path in self._folder.glob("[0-9]*-*"):
            if int(path.name.split("-")[0]) <= upto:
                self._kept.discard(path)
                with contextlib.suppress(OSError):
                    self._disk.remove(path)

    def _path(self, round_: int, frame: bytes) -> Path:
        return self._folder / f"{round_:012d}-{frame.hex()[:32]}"


class DurableStore:
    """The durable side of a run directory: the way to where the chain stands here, and the vote that binds a peer."""

    def __init__(self, out: Path, *, disk: Disk = DISK) -> None:
        """Open or create. Raises DiskError."""
        self._disk, self._out = disk, out
        kept = (out / name for name in ("journal", "acceptor", "checkpoints", "adopted"))
        # Before the journal is opened, which may shorten it.
        self._written = max((path.stat().st_mtime for path in kept if path.exists()), default=None)
        self.checkpoints = out / "checkpoints"
        self.adopted = out / "adopted"
        self.aside = out / "aside"
        self.frames = FrameFolder(out / "frames", disk)
        self.journal = Journal(out / "journal", disk)
        self.acceptor = AcceptorFile(out / "acceptor", disk)
        self.swapped = out / "swapped"  # is there when a gossip step was begun after the newest checkpoint
        self._swapping, self.swaps = threading.Lock(), 0  # gossip steps that were begun in this process
        self._forgotten = 0  # commits dropped from the front of the journal since it was opened
        self._has_frozen = False
        self._saved: list[tuple[int, int]] = []  # of each checkpoint that is kept: round, commits before it
        self.frames.sweep()

    def ledger(self) -> Ledger:
        """The ledger that the driver writes through."""
        return Ledger(self.append, self.acceptor.write, self.frames.keep, self.adopt, self.swap_begins, self.set_aside)

    def away(self, wall: Callable[[], float] = time.time) -> float:
        """Seconds of the wall's clock since an earlier process wrote here what it decided; 0 where it went back."""
        return 0.0 if self._written is None else max(0.0, wall() - self._written)

    def past(self, head: Head, acceptor: Acceptor | None) -> Past:
        """Return what is here of the way to ``head``, with frames of its newest commits and of the record voted for."""
        metas = [*load_metas(self.checkpoints), *load_metas(self.adopted)]
        starts = {start.hash: start for start in (Head.from_dict(meta["head"]) for meta in metas)}
        past = retrace(starts, map(_commit, self.journal.entries), head)
        records = [commit.record for commit in past.commits]
        if acceptor is not None and acceptor.accepted is not None:
            records.append(acceptor.accepted)
        return replace(past, frames=self.frames.of(records))

    def append(self, commit: Commit, frames: Sequence[bytes]) -> None:
        """Make a commit durable: frames first, so that a commit in the journal can always be replayed."""
        self.frames.keep(commit.record, frames)
        self.journal.append(encode(commit))

    def adopt(self, head: Head, tensors: Mapping[str, Tensor]) -> None:
        """Make a snapshot durable that is about to be used; the next checkpoint replaces it."""
        save(self.adopted, f"round-{head.outer_step:06d}", tensors, {"head": head.to_dict()}, self._disk)

    def set_aside(self, head: Head, tensors: Mapping[str, Tensor]) -> None:
        """Keep what this peer had, before it takes over a state that it cannot check; one of them at a time."""
        save(self.aside, f"round-{head.outer_step:06d}", tensors, {"head": head.to_dict()}, self._disk, keep=1)

    def swap_begins(self) -> None:
        """Make it durable that a partner may soon hold what the newest checkpoint owes."""
        with self._swapping:
            self.swaps += 1
            if not self.swapped.exists():
                with disk_errors(f"writing {self.swapped}"):
                    self._disk.replace_file(self.swapped, [])

    def save(
        self, head: Head, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, swaps: int | None = None
    ) -> None:
        """Write a checkpoint and drop the commits and frames that every kept checkpoint has behind it.

        ``swaps``: as it was when the tensors were taken, where that was a while ago; debts of theirs may be paid since.
        """
        made = meta.get("gossip_step") or head.outer_step  # what status and summary call the round
        save(self.checkpoints, f"round-{made:06d}", tensors, {**meta, "head": head.to_dict()}, self._disk)
        with self._swapping:
            if swaps in (None, self.swaps) and self.swapped.exists():
                with contextlib.suppress(OSError):
                    self._disk.remove(self.swapped)
                    self._disk.sync_folder(self._out)  # or a power cut brings it back, and the debt of this one is gone
        self._saved = [*self._saved, (head.round, self._commits_before(head))][-KEPT_CHECKPOINTS:]
        if len(self._saved) == KEPT_CHECKPOINTS:
            self._forgotten += self.journal.forget(self._saved[0][1] - self._forgotten)
            self.frames.drop(min(round_ for round_, _ in self._saved))
        adopted = [Head.from_dict(meta["head"]).weight for meta in load_metas(self.adopted)]
        if adopted and max(adopted) <= head.weight:  # one may have come since the tensors were taken
            with contextlib.suppress(OSError):
                self._disk.remove(self.adopted)

    def keep_frozen(
        self, specs: Sequence[FrozenSpec], tensors: Callable[[], Mapping[str, Tensor]], whole: Whole = as_it_is
    ) -> None:
        """Write what is not trained, once: no checkpoint holds it, and an export needs it.

        ``whole``: see `keep_frozen` of the state.
        """
        if specs and not self._has_frozen:
            keep_frozen(self._out, specs, tensors, self._disk, whole)
            self._has_frozen = True

    def load(self, run: bytes) -> Resumed | None:
        """The newest valid checkpoint, or None. DiskError when all are damaged, ManifestMismatch for another run's.

        Without its debts where a gossip step was begun since: the partner may have been given them.
        """
        found = load_newest(self.checkpoints)
        if found is None:
            return None
        head = Head.from_dict(found.meta["head"])
        if head.run != run:
            raise ManifestMismatch(
                f"{self.checkpoints} holds another run ({head.run.hex()[:12]}); choose another --out for this one"
            )
        self._saved = [(head.round, 0)]
        swapped = self.swapped.exists() or (found.passed_over and found.meta.get("gossip_step"))
        tensors = _without_feedback(found.tensors) if swapped else found.tensors
        resumed = Resumed(head, tensors, found.meta, found.passed_over)
        return self._with_adopted(resumed)

    def _with_adopted(self, resumed: Resumed) -> Resumed:
        """Stand where a snapshot led that no checkpoint contains yet.

        The debt goes as the live model does: the rounds that the snapshot spared this peer may have taken from both. In
        gossip they took from neither, and a snapshot is a head alone.
        """
        try:
            newer = load_newest(self.adopted)
        except DiskError:  # damaged: the others have it, as they had when it was fetched
            return resumed
        if newer is None or (head := Head.from_dict(newer.meta["head"])).weight <= resumed.head.weight:
            return resumed
        if not newer.tensors:
            return replace(resumed, head=head)
        return replace(resumed, head=head, tensors={**_live_part(resumed.tensors), **newer.tensors}, adopted=True)

    def last_vote(self, run: bytes) -> Acceptor | None:
        """Return what this peer promised and accepted last: it binds a peer that has no checkpoint yet as well.

        Raises DiskError when it is damaged: going on without it could vote twice.
        """
        blob = self.acceptor.read()
        acceptor = None if blob is None else Acceptor.from_bytes(blob)
        foreign = acceptor is not None and acceptor.accepted is not None and acceptor.accepted.run != run
        return None if foreign else acceptor

    def replay(self, head: Head, replica: Replica, me: PeerId) -> tuple[Head, bool]:
        """Apply the journalled commits after ``head``; returns the new head and whether one named ``me``."""
        named = False
        for body in self.journal.entries:
            record = _commit(body).record
            if (frames := self._frames_to_follow(head, record)) is None:
                continue
            if moves_anchor(record):
                replica.install(outer_step(replica, record, frames))
            replica.senders.keep_only(record.next_members)
            if me in {ref.peer for ref in contributions(record)}:
                named = True
                replica.feedback[record.fragment] = forget_sent(replica, record, frames, me)[0]
            else:  # its results may be named all the same
                owed_N, numel = replica.owed_as_owner(record.fragment), replica.numel(record.fragment)
                replica.owe(record.fragment, owed_after(owed_N, record, me, {}, numel))
            anchor = replica.digest if moves_anchor(record) else record.base
            head = replace(head.extended(record), anchor=anchor)
        return head, named

    def leads_to_the_end(self, head: Head) -> bool:
        """Tell whether ``replay`` from ``head`` arrives at the run's last commit."""
        for body in self.journal.entries:
            record = _commit(body).record
            if self._frames_to_follow(head, record) is not None:
                head = head.extended(record)
        return head.final

    def _frames_to_follow(self, head: Head, record: Record) -> dict[bytes, Frame] | None:
        """The frames of ``record``; None where it does not follow ``head``, or not all of them are here and whole.

        It may be of a branch that was given up. Where frames are damaged, the swarm has the rest.
        """
        if record.round != head.round + 1:
            return None
        try:
            check_succession(head, record)
            return {ref.frame: self.frames.read(record.round, ref.frame) for ref in record.frames}
        except (PayloadError, OSError):
            return None

    def close(self) -> None:
        """Give the files back."""
        self.journal.close()

    def _commits_before(self, head: Head) -> int:
        """Commits that a checkpoint of ``head`` contains; more may have come while it was being written."""
        entries = list(self.journal.entries)
        later = itertools.takewhile(lambda body: _commit(body).record.round > head.round, reversed(entries))
        return self._forgotten + len(entries) - sum(1 for _ in later)


def _without_feedback(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not is_feedback(name)}


def _live_part(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without what a newer snapshot replaces, also where it has nothing in its place."""
    return {name: tensor for name, tensor in _without_feedback(tensors).items() if not is_of_sender(name)}


def _commit(body: bytes) -> Commit:
    return decode_kept(body)
