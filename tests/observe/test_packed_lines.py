import io
import json
import re
import resource

import pytest
import zstandard

from decentral.errors import DiskError
from decentral.observe.lines import MAX_LINE_NBYTES, Damage, JsonLines, lines_of, pack_lines, read_json_lines
from decentral.state.durable import Disk


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
