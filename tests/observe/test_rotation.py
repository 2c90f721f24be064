"""Every line once and in order, wherever a process is killed, the power is cut or a reader looks."""

from __future__ import annotations

import itertools
import json
import random
import threading
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from decentral.observe import lines
from decentral.observe.events import FileTail
from decentral.observe.lines import KEPT, JsonLines, opened, pack_lines, pack_put_aside, put_aside, read_json_lines
from decentral.simulate.disk import RecordingDisk, crash_states
from decentral.state.durable import Disk

FORMS = ("absent", "plain", "packed", "both")
PER_FILE = 3  # lines


class Killed(BaseException):
    pass


class Dies(RecordingDisk):
    """Is killed before an operation; without one it counts them."""

    def __init__(self, root: Path, before: int | None = None) -> None:
        super().__init__(root)
        self.done, self._before = 0, before

    def carry_out(self, operation):
        if self.done == self._before:
            raise Killed
        self.done += 1
        super().carry_out(operation)


def append(path: Path, *numbers: int) -> None:
    with path.open("a") as file:
        file.writelines(f'{{"i":{number}}}\n' for number in numbers)


def lay(path: Path, forms: tuple[str, ...]) -> None:
    """Files in these forms, the oldest number first; the lines count up through all of them."""
    for found in path.parent.iterdir():
        found.unlink()
    count = itertools.count()
    for number, form in zip(range(len(forms), 0, -1), forms, strict=True):
        lines = [next(count) for _ in range(PER_FILE)]
        if form == "absent":
            continue
        plain = path.with_name(f"x.{number}.jsonl")
        append(plain, *lines)
        if form != "plain":
            data = plain.read_bytes()
            pack_lines(plain, RecordingDisk(path.parent))
            if form == "both":
                plain.write_bytes(data)
    append(path, *(next(count) for _ in range(PER_FILE)))


def read(path: Path) -> list[int]:
    return [row["i"] for row in read_json_lines(path)]


def numbers(lines) -> list[int]:
    return [json.loads(line)["i"] for line in lines]


def rotate(path: Path, disk: Disk) -> None:
    put_aside(path, disk)
    append(path)
    pack_put_aside(path, disk)


@pytest.mark.parametrize("forms", [*itertools.product(FORMS, repeat=KEPT)], ids="-".join)
def test_wherever_a_process_is_killed_every_line_is_read_once_and_the_next_time_all_is_packed(tmp_path, forms):
    path = tmp_path / "x.jsonl"
    lay(path, forms)
    before = read(path)
    oldest = before[:PER_FILE] if "absent" not in forms else []  # goes, if all places are taken
    rotate(path, whole := Dies(tmp_path))
    for killed_before in range(whole.done):
        lay(path, forms)
        with suppress(Killed):
            rotate(path, Dies(tmp_path, killed_before))
        assert read(path) in (before, before[len(oldest) :]), killed_before
        append(path, 100)
        left = read(path)
        rotate(path, Dies(tmp_path))
        assert set(read(path)) >= set(left[PER_FILE:]), killed_before
        assert read(path) == sorted(set(read(path)))
        put_aside_ = sorted(found.name for found in tmp_path.iterdir() if found != path)
        assert set(put_aside_) <= {f"x.{number}.jsonl.zst" for number in range(1, KEPT + 1)}, killed_before


def test_a_power_cut_while_a_file_is_packed_leaves_its_lines_once(tmp_path):
    path = tmp_path / "x.jsonl"
    lay(path, ())
    disk = RecordingDisk(tmp_path, keep_log=True)
    rotate(path, disk)
    for state in list(crash_states(disk.log, disk.base, limit=10_000)):
        disk.become(state.tree)
        assert read(path) == [0, 1, 2], state


def looks_of(monkeypatch, happens, at):
    """Let ``happens`` run before the ``at``-th time that somebody looks at a file; returns how often that was."""
    count, busy = itertools.count(), []

    def wrapped(real):
        def look(*args, **options):
            if not busy and next(count) == at:
                busy.append(True)
                happens()
                busy.clear()
            return real(*args, **options)

        return look

    monkeypatch.setattr(Path, "stat", wrapped(Path.stat))
    monkeypatch.setattr(Path, "open", wrapped(Path.open))
    return count


@pytest.mark.parametrize("change", [put_aside, pack_put_aside, rotate], ids=lambda change: change.__name__)
@pytest.mark.parametrize("forms", [(), ("plain", "plain"), ("plain", "packed", "plain"), ("packed", "both", "packed")])
def test_whenever_a_file_is_put_aside_or_packed_who_reads_finds_every_line_once(tmp_path, monkeypatch, forms, change):
    path = tmp_path / "x.jsonl"
    for at in range(200):
        lay(path, forms)
        before = read(path)
        oldest = PER_FILE if len(forms) == KEPT else 0
        with monkeypatch.context() as patch:
            count = looks_of(patch, lambda: change(path, RecordingDisk(tmp_path)), at)
            with ExitStack() as stack:
                files = opened(path, stack)
                looks = next(count)
                found = [line for file in reversed(files) for line in file.lines()]
        assert numbers(found) in (before, before[oldest:]), at
        if looks <= at:
            return
    raise AssertionError("it looks on for ever")


def test_who_has_begun_to_read_goes_on_whatever_is_renamed_packed_or_removed(tmp_path):
    path = tmp_path / "x.jsonl"
    lay(path, ("packed", "plain", "plain"))
    rows = read_json_lines(path)
    assert next(rows) == {"i": 0}
    for _ in range(KEPT + 2):
        rotate(path, RecordingDisk(tmp_path))
        append(path, 100)
    assert [row["i"] for row in rows] == list(range(1, 4 * PER_FILE))


class Hangs(Disk):
    """Writes once it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.waited: list[bool] = []

    def write(self, path, parts, at=None):
        self.waited.append(self.let.wait(20))
        super().write(path, parts, at)


def test_who_logs_does_not_wait_until_a_file_is_packed(tmp_path):
    disk = Hangs()
    lines = JsonLines(tmp_path / "x.jsonl", max_nbytes=100, disk=disk)
    for i in range(18):
        lines.append({"i": i})
    assert (tmp_path / "x.1.jsonl").exists()
    assert read(tmp_path / "x.jsonl") == list(range(18))
    disk.let.set()
    lines.close()
    assert disk.waited == [True]
    assert sorted(found.name for found in tmp_path.iterdir()) == ["x.1.jsonl.zst", "x.jsonl"]
    assert read(tmp_path / "x.jsonl") == list(range(18))


class Full(Disk):
    def write(self, path, parts, at=None):
        super().write(path, [b"half"], at)
        raise OSError(28, "No space left on device")


def test_a_disk_too_full_to_pack_on_keeps_the_plain_file_and_lets_the_writer_go_on(tmp_path):
    path = tmp_path / "x.jsonl"
    lines = JsonLines(path, max_nbytes=100, disk=Full())
    for i in range(30):
        lines.append({"i": i})
    lines.close()
    names = sorted(found.name for found in tmp_path.iterdir())
    assert names == ["x.1.jsonl", "x.2.jsonl", "x.jsonl"]
    assert read(path) == list(range(30))
    lines = JsonLines(path, max_nbytes=100)  # there is space again
    for i in range(30, 40):
        lines.append({"i": i})
    lines.close()
    assert {found.name for found in tmp_path.iterdir() if found != path} <= {f"x.{n}.jsonl.zst" for n in (1, 2, 3)}
    assert read(path) == list(range(40))


def test_a_file_longer_than_a_packed_one_is_read_stays_plain(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_NBYTES", 100)
    path = tmp_path / "x.jsonl"
    append(path, *range(50))
    rotate(path, RecordingDisk(tmp_path))
    assert (tmp_path / "x.1.jsonl").exists()
    assert read(path) == list(range(50))


def test_who_may_read_a_file_may_read_it_packed(tmp_path):
    path = tmp_path / "x.jsonl"
    append(path, 1)
    path.chmod(0o640)
    rotate(path, Disk())
    assert (tmp_path / "x.1.jsonl.zst").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_in_whatever_order_lines_come_out_once_and_in_order(tmp_path, seed):
    """Appends, rotations, kills in the middle of them; who reads what was opened before; who follows all along."""
    rng, path, written, followed = random.Random(seed), tmp_path / "x.jsonl", 0, []
    counts = [0]  # lines of each file since the beginning
    tail, stack = FileTail(path), ExitStack()
    readers = []
    with stack, closing(tail):
        for _ in range(80):
            match rng.choice(("append", "append", "rotate", "kill", "read", "go on", "follow")):
                case "append":
                    append(path, written)
                    written, counts[-1] = written + 1, counts[-1] + 1
                case "rotate" if counts[-1]:
                    rotate(path, Dies(tmp_path))
                    counts.append(0)
                case "kill" if counts[-1]:
                    with suppress(Killed):
                        rotate(path, Dies(tmp_path, rng.randrange(12)))
                    counts.append(0)
                case "read":
                    found = read(path)
                    readers.append((opened(path, stack), found))
                    assert found == list(range(written - len(found), written))
                    assert len(found) >= sum(counts[-KEPT:])
                case "go on":
                    for files, found in readers:
                        later = numbers(line for file in reversed(files) for line in file.lines())
                        assert later[: len(found)] == found
                        assert later == sorted(set(later))
                    readers.clear()
                case "follow":
                    followed += numbers(tail.new_lines())
                    assert followed == sorted(set(followed))
        append(path, written)
        followed += numbers(tail.new_lines())
        assert followed == sorted(set(followed))
        assert followed[-sum(counts[-KEPT:]) - 1 :] == list(range(written - sum(counts[-KEPT:]), written + 1))
