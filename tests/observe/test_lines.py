"""tests/observe/test_lines.py"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import random
import re
import resource
import threading
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import zstandard

from decentral.errors import DiskError
from decentral.observe import lines
from decentral.observe.events import FileTail
from decentral.observe.lines import (
    KEPT_FILES,
    MAX_LINE_NBYTES,
    Damage,
    JsonLines,
    lines_of,
    open_files,
    pack_lines,
    pack_put_aside,
    put_aside,
    read_json_lines,
    to_line,
)
from decentral.simulate.disk import RecordingDisk, crash_states
from decentral.state.durable import Disk
from tests.kit.disks import Killed
from tests.kit.patience import PATIENCE


def test_what_is_appended_is_read_back_in_order(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "x.jsonl")
    for i in range(5):
        lines.append({"i": i, "name": "ä"})
    lines.close()
    lines.append({"i": "after close, which is passed over"})
    assert [row["i"] for row in read_json_lines(tmp_path / "x.jsonl")] == [0, 1, 2, 3, 4]


def test_a_torn_last_line_is_passed_over_and_the_next_line_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"i":0}\n{"i":1,"text":"ha')
    lines = JsonLines(path)
    lines.append({"i": 2})
    lines.close()
    assert [row["i"] for row in read_json_lines(path)] == [0, 2]


def test_a_line_that_an_almost_full_disk_took_half_of_is_an_error_and_never_joined_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.append({"i": 0})
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[: len(data) // 2]))
        with pytest.raises(DiskError, match="No space left"):
            lines.append({"i": 1})
    lines.append({"i": 2})
    lines.close()
    assert [row["i"] for row in read_json_lines(tmp_path / "x.jsonl")] == [0, 2]


def test_lines_of_many_threads_never_mix(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "x.jsonl")

    def write(worker: int) -> None:
        for i in range(200):
            lines.append({"worker": worker, "i": i, "pad": "x" * (i % 50)})

    threads = [threading.Thread(target=write, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines.close()
    rows = list(read_json_lines(tmp_path / "x.jsonl"))
    assert len(rows) == 800
    for worker in range(4):
        assert [row["i"] for row in rows if row["worker"] == worker] == list(range(200))


@pytest.mark.parametrize(
    "row",
    [
        {"text": "x" * 10**6},
        {"many": [f"item {i}" * 20 for i in range(10**4)]},
        {f"key{i}": "y" * 400 for i in range(500)},
        {"deep": {"deeper": {f"k{i}": "z" * 5000 for i in range(300)}}},
    ],
)
def test_a_line_is_bounded_and_still_json_that_says_it_was_cut(row: dict[str, object]) -> None:
    line = to_line({"event": "e", **row})
    assert len(line) <= MAX_LINE_NBYTES
    assert json.loads(line)["truncated"] is True
    assert json.loads(line)["event"] == "e"


def test_values_without_json_become_the_nearest_plain_ones() -> None:
    row = json.loads(to_line({"digest": b"\x01\xff", "nan": math.nan, "path": Path("a/b"), "set": {3}, "t": (1, 2.5)}))
    assert row == {"digest": "01ff", "nan": None, "path": "a/b", "set": [3], "t": [1, 2.5]}


def test_an_unwritable_place_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"cannot be written \(Is a directory\); choose another --out"):
        JsonLines(tmp_path)


def test_a_full_disk_is_said_as_such() -> None:
    lines = JsonLines(Path("/dev/full"))
    with pytest.raises(DiskError, match=r"No space left on device.*free some space"):
        lines.append({"i": 1})
    lines.close()


def test_a_full_file_is_put_aside_and_what_is_read_is_the_last_of_all_in_order(tmp_path: Path) -> None:
    """A year of rounds was a file of gigabytes."""
    path = tmp_path / "x.jsonl"
    lines = JsonLines(path, max_nbytes=1000)
    for i in range(500):
        lines.append({"i": i, "pad": "x" * 50})
    lines.close()
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["x.1.jsonl.zst", "x.2.jsonl.zst", "x.3.jsonl.zst", "x.jsonl"]
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())
    read = [row["i"] for row in read_json_lines(path)]
    assert read == list(range(500 - len(read), 500))
    assert len(read) > 40


def test_a_file_that_is_found_full_is_put_aside_too(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"i":0}\n' * 200 + b'{"torn')
    lines = JsonLines(path, max_nbytes=1000)
    lines.append({"i": 1})
    lines.close()
    assert path.read_bytes() == b'{"i":1}\n'
    assert [row["i"] for row in read_json_lines(path)] == [0] * 200 + [1]


def test_a_line_longer_than_a_file_may_be_has_one_of_its_own(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "x.jsonl", max_nbytes=10)
    for i in range(3):
        lines.append({"i": i, "pad": "x" * 50})
    lines.close()
    assert [row["i"] for row in read_json_lines(tmp_path / "x.jsonl")] == [0, 1, 2]


def test_a_file_that_cannot_be_put_aside_grows_on_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)  # as Windows does while somebody else has it open
    lines = JsonLines(tmp_path / "x.jsonl", max_nbytes=100)
    for i in range(20):
        lines.append({"i": i})
    lines.close()
    assert [row["i"] for row in read_json_lines(tmp_path / "x.jsonl")] == list(range(20))


def written(path, count=2000):
    log = JsonLines(path)
    for number in range(count):
        log.append(
            {"version": 1, "time": 1700000000.25 + number, "event": "commit", "round": number, "peers": ["a", "b"]}
        )
    log.close()
    return list(read_json_lines(path))


def read(path, packed=True):
    with path.open("rb") as file:
        return [json.loads(line) for line in lines_of(file, packed=packed)]


def test_packed_lines_are_a_tenth_and_read_as_they_were(tmp_path):
    path = tmp_path / "events.1.jsonl"
    rows, nbytes = written(path), path.stat().st_size
    assert read(path, packed=False) == rows
    packed = pack_lines(path)
    assert [found.name for found in tmp_path.iterdir()] == [packed.name] == ["events.1.jsonl.zst"]
    assert packed.stat().st_size < 0.1 * nbytes
    assert read(packed) == rows


def test_any_zstd_reads_them_and_what_was_joined_by_hand_is_read_as_one(tmp_path):
    one, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    rows = written(one, 30) + written(other, 20)
    plain = one.read_bytes()
    packed = [pack_lines(path).read_bytes() for path in (one, other)]
    assert zstandard.ZstdDecompressor().stream_reader(packed[0]).read() == plain
    both = tmp_path / "both.zst"
    both.write_bytes(b"".join(packed))
    assert read(both) == rows


def test_of_a_file_that_is_cut_short_the_lines_before_are_read(tmp_path):
    rows = written(tmp_path / "a.jsonl", 20_000)
    data = pack_lines(tmp_path / "a.jsonl").read_bytes()
    damages = list[Damage]()
    found = list(lines_of(io.BytesIO(data[: len(data) // 2]), packed=True, on_damage=damages.append))
    assert 1000 < len(found) < len(rows)
    assert [(damage.num_lines, damage.share, damage.why) for damage in damages] == [
        (len(found) - 1, 1.0, "it ends inside a line")
    ]
    assert [json.loads(line) for line in found[:-1]] == rows[: len(found) - 1]


def test_a_damaged_file_is_named_with_the_reason_and_the_share_that_was_read(tmp_path, caplog):
    """Its lines were missing without a word."""
    path = tmp_path / "events.jsonl"
    rows = written(path, 20_000)
    packed = pack_lines(path.rename(tmp_path / "events.1.jsonl"))
    assert list(read_json_lines(path)) == rows
    assert caplog.messages == []
    data = bytearray(packed.read_bytes())
    data[2 * len(data) // 3 : 2 * len(data) // 3 + 2000] = bytes(2000)
    packed.write_bytes(data)
    num_read = len(list(read_json_lines(path)))
    assert 1000 < num_read < len(rows)
    (message,) = caplog.messages
    found = re.fullmatch(rf"{packed} is damaged: (.+); ([\d,]+) lines were read, of at most (\d+)% .+", message)
    assert found is not None, message
    assert "zstd" in found[1]
    assert int(found[2].replace(",", "")) >= num_read
    assert 60 <= int(found[3]) <= 85


def test_a_bit_that_flipped_inside_a_word_is_damage_too(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    path.with_name("events.1.jsonl").write_bytes(b'{"event": "commit", "round": 7}\n')  # too short to be packed smaller
    packed = pack_lines(path.with_name("events.1.jsonl"))
    data = packed.read_bytes()
    packed.write_bytes(data.replace(b"7", b"3"))
    assert packed.read_bytes() != data
    list(read_json_lines(path))
    assert "checksum" in caplog.text


@pytest.mark.parametrize("data", [b"", b"\0" * 40, b"(\xb5/\xfd", b"x" * 100, bytes.fromhex("28b52ffd00f8")])
def test_what_is_no_zstd_has_no_lines(data):
    assert list(lines_of(io.BytesIO(data), packed=True)) == []


def test_lines_longer_than_any_that_is_written_are_left_out():
    long = b"x" * (3 * MAX_LINE_NBYTES) + b"\n"
    for packed in (False, True):
        data = b"1\n" + long + b"2\n" + long + b"3"
        data = zstandard.ZstdCompressor().compress(data) if packed else data
        assert list(lines_of(io.BytesIO(data), packed=packed)) == [b"1\n", b"2\n", b"3"]


def test_a_bomb_ends_where_no_file_of_ours_would_be_that_long():
    compressor = zstandard.ZstdCompressor().compressobj()
    data = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(300))
    data += compressor.compress(b"\nthe end\n") + compressor.flush()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert list(lines_of(io.BytesIO(data), packed=True)) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 24 << 10  # KiB


def test_a_window_of_a_gibibyte_is_not_made_room_for():
    head = bytes.fromhex("28b52ffd00") + bytes([(30 - 10) << 3])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert list(lines_of(io.BytesIO(head + b"\x13\0\0A\n"), packed=True)) == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10


class Full(Disk):
    def write(self, path, parts, at=None):
        super().write(path, [b"half"], at)
        raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "events.1.jsonl"
    rows = written(path, 10)
    with pytest.raises(DiskError, match="No space left"):
        pack_lines(path, Full())
    assert [found.name for found in tmp_path.iterdir()] == ["events.1.jsonl"]
    assert read(path, packed=False) == rows


# ---- test rotation ----
#
# Every line once and in order, wherever a process is killed, the power is cut or a reader looks.

FORMS = ("absent", "plain", "packed", "both")
PER_FILE = 3  # lines


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


def read_of_rotation(path: Path) -> list[int]:
    return [row["i"] for row in read_json_lines(path)]


def numbers(lines) -> list[int]:
    return [json.loads(line)["i"] for line in lines]


def rotate(path: Path, disk: Disk) -> None:
    put_aside(path, disk)
    append(path)
    pack_put_aside(path, disk)


@pytest.mark.parametrize("forms", [*itertools.product(FORMS, repeat=KEPT_FILES)], ids="-".join)
def test_wherever_a_process_is_killed_every_line_is_read_once_and_the_next_time_all_is_packed(tmp_path, forms):
    path = tmp_path / "x.jsonl"
    lay(path, forms)
    before = read_of_rotation(path)
    oldest = before[:PER_FILE] if "absent" not in forms else []  # goes, if all places are taken
    rotate(path, whole := Dies(tmp_path))
    for killed_before in range(whole.done):
        lay(path, forms)
        with suppress(Killed):
            rotate(path, Dies(tmp_path, killed_before))
        assert read_of_rotation(path) in (before, before[len(oldest) :]), killed_before
        append(path, 100)
        left = read_of_rotation(path)
        rotate(path, Dies(tmp_path))
        assert set(read_of_rotation(path)) >= set(left[PER_FILE:]), killed_before
        assert read_of_rotation(path) == sorted(set(read_of_rotation(path)))
        put_aside_ = sorted(found.name for found in tmp_path.iterdir() if found != path)
        assert set(put_aside_) <= {f"x.{number}.jsonl.zst" for number in range(1, KEPT_FILES + 1)}, killed_before


def test_a_power_cut_while_a_file_is_packed_leaves_its_lines_once(tmp_path):
    path = tmp_path / "x.jsonl"
    lay(path, ())
    disk = RecordingDisk(tmp_path, keep_log=True)
    rotate(path, disk)
    for state in list(crash_states(disk.log, disk.base, limit=10_000)):
        disk.become(state.tree)
        assert read_of_rotation(path) == [0, 1, 2], state


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
        before = read_of_rotation(path)
        oldest = PER_FILE if len(forms) == KEPT_FILES else 0
        with monkeypatch.context() as patch:
            count = looks_of(patch, lambda: change(path, RecordingDisk(tmp_path)), at)
            with ExitStack() as stack:
                files = open_files(path, stack)
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
    for _ in range(KEPT_FILES + 2):
        rotate(path, RecordingDisk(tmp_path))
        append(path, 100)
    assert [row["i"] for row in rows] == list(range(1, 4 * PER_FILE))


class Hangs(Disk):
    """Writes once it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.waited: list[bool] = []

    def write(self, path, parts, at=None):
        self.waited.append(self.let.wait(PATIENCE))
        super().write(path, parts, at)


def test_who_logs_does_not_wait_until_a_file_is_packed(tmp_path):
    disk = Hangs()
    lines = JsonLines(tmp_path / "x.jsonl", max_nbytes=100, disk=disk)
    for i in range(18):
        lines.append({"i": i})
    assert (tmp_path / "x.1.jsonl").exists()
    assert read_of_rotation(tmp_path / "x.jsonl") == list(range(18))
    disk.let.set()
    lines.close()
    assert disk.waited == [True]
    assert sorted(found.name for found in tmp_path.iterdir()) == ["x.1.jsonl.zst", "x.jsonl"]
    assert read_of_rotation(tmp_path / "x.jsonl") == list(range(18))


def test_a_disk_too_full_to_pack_on_keeps_the_plain_file_and_lets_the_writer_go_on(tmp_path):
    path = tmp_path / "x.jsonl"
    lines = JsonLines(path, max_nbytes=100, disk=Full())
    for i in range(30):
        lines.append({"i": i})
    lines.close()
    names = sorted(found.name for found in tmp_path.iterdir())
    assert names == ["x.1.jsonl", "x.2.jsonl", "x.jsonl"]
    assert read_of_rotation(path) == list(range(30))
    lines = JsonLines(path, max_nbytes=100)  # there is space again
    for i in range(30, 40):
        lines.append({"i": i})
    lines.close()
    assert {found.name for found in tmp_path.iterdir() if found != path} <= {f"x.{n}.jsonl.zst" for n in (1, 2, 3)}
    assert read_of_rotation(path) == list(range(40))


def test_a_file_longer_than_a_packed_one_is_read_stays_plain(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_UNPACKED_NBYTES", 100)
    path = tmp_path / "x.jsonl"
    append(path, *range(50))
    rotate(path, RecordingDisk(tmp_path))
    assert (tmp_path / "x.1.jsonl").exists()
    assert read_of_rotation(path) == list(range(50))


def test_who_may_read_a_file_may_read_it_packed(tmp_path):
    path = tmp_path / "x.jsonl"
    append(path, 1)
    path.chmod(0o640)
    rotate(path, Disk())
    assert (tmp_path / "x.1.jsonl.zst").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(n, marks=pytest.mark.long) for n in range(8, 40))])
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
                    found = read_of_rotation(path)
                    readers.append((open_files(path, stack), found))
                    assert found == list(range(written - len(found), written))
                    assert len(found) >= sum(counts[-KEPT_FILES:])
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
        assert followed[-sum(counts[-KEPT_FILES:]) - 1 :] == list(
            range(written - sum(counts[-KEPT_FILES:]), written + 1)
        )
