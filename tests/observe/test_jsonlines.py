import json
import math
import os
import threading
from pathlib import Path

import pytest

from decentral.errors import DiskError
from decentral.observe.lines import MAX_LINE_NBYTES, JsonLines, read_json_lines, to_line


def test_what_is_appended_is_read_back_in_order(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "x.jsonl")
    for i in range(5):
        lines.append({"i": i, "name": "ä"})
    lines.close()
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


def test_an_append_after_close_is_ignored(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.close()
    lines.append({"late": True})
    assert list(read_json_lines(tmp_path / "x.jsonl")) == []


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


def test_who_reads_while_a_file_is_put_aside_misses_nothing_and_reads_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = JsonLines(path, max_nbytes=200)
    lines.append({"i": 0, "pad": "x" * 150})
    lines.append({"i": 1, "pad": "x" * 150})
    rows = read_json_lines(path)
    assert next(rows)["i"] == 0
    lines.append({"i": 2, "pad": "x" * 150})
    assert [row["i"] for row in rows] == [1]
    lines.close()
    assert [row["i"] for row in read_json_lines(path)] == [0, 1, 2]
