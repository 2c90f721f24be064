import json

import pytest
import torch

from decentral.errors import ConfigError, DiskError, PayloadError
from decentral.parameters import gather, schema_of
from decentral.state.snapshot import (
    CHUNK_NBYTES,
    MAX_META_NBYTES,
    Assembler,
    Layout,
    Snapshot,
    SnapshotIndex,
    anchor_name,
    outer_name,
)

PER_CHUNK = CHUNK_NBYTES // 4


def make_tensors(numel=2 * PER_CHUNK + 11):
    generator = torch.Generator().manual_seed(numel)
    return {
        "anchor/0": torch.randn(numel, generator=generator),
        "anchor/1": torch.randn(3, 5, generator=generator),
    }


@pytest.fixture
def snapshot():
    return Snapshot(make_tensors(), {"round": 41, "record": "ab" * 32})


def flat(tensors):
    return {name: tensor.flatten() for name, tensor in tensors.items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_a_snapshot_arrives_bit_for_bit_in_any_order(snapshot):
    index = SnapshotIndex.from_bytes(snapshot.index.to_bytes(), Layout.of(make_tensors()))
    assembler = Assembler(index)
    assert assembler.missing() == [0, 1, 2]
    with pytest.raises(ConfigError, match="3 chunks are missing"):
        assembler.tensors()
    for number in (2, 0, 2, 1):
        assembler.add(number, snapshot.chunk(number))
    assert assembler.missing() == []
    assert same(assembler.tensors(), flat(make_tensors()))
    assert index.meta == {"round": 41, "record": "ab" * 32}
    assert index.digest == snapshot.index.digest


def test_a_joiner_knows_the_layout_from_its_own_model():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    schema = schema_of(model, 2)
    parameters = dict(model.named_parameters())
    tensors = {}
    for fragment in schema.fragments:
        tensors[anchor_name(fragment.index)] = gather(parameters, fragment)
        tensors[outer_name(fragment.index, "momentum")] = torch.zeros(fragment.numel)
    assert Layout.from_schema(schema, ("momentum",)) == Layout.of(tensors)
    index = Snapshot(tensors, {}).index
    with pytest.raises(PayloadError, match="another model or outer optimizer"):
        SnapshotIndex.from_bytes(index.to_bytes(), Layout.from_schema(schema))


def test_training_on_does_not_change_a_snapshot():
    tensors = make_tensors()
    snapshot = Snapshot(tensors, {})
    before = snapshot.chunk(0)
    tensors["anchor/0"] += 1
    assert snapshot.chunk(0) == before


@pytest.mark.parametrize("numel", [0, 1, PER_CHUNK - 1, PER_CHUNK, PER_CHUNK + 1])
def test_sizes_around_a_chunk_border_survive(numel):
    tensors = {"x": torch.arange(numel, dtype=torch.float32)}
    snapshot = Snapshot(tensors, {})
    assembler = Assembler(snapshot.index)
    for number in assembler.missing():
        assembler.add(number, snapshot.chunk(number))
    assert same(assembler.tensors(), tensors)


def test_a_lying_donor_costs_one_chunk_and_spoils_nothing(snapshot):
    assembler = Assembler(snapshot.index)
    good = snapshot.chunk(0)
    for lie in (b"", snapshot.chunk(1), bytes([good[0] ^ 1]) + good[1:]):
        with pytest.raises(PayloadError, match="chunk 0 is not what the index names"):
            assembler.add(0, lie)
        assert 0 in assembler.missing()
    for number in (-1, 3, 2**40):
        with pytest.raises(PayloadError, match="drop the donor"):
            assembler.add(number, good)
        with pytest.raises(PayloadError, match="the snapshot has 3"):  # who asks is at fault
            snapshot.chunk(number)
    assembler.add(0, good)
    with pytest.raises(PayloadError):
        assembler.add(0, snapshot.chunk(1))
    assert assembler.missing() == [1, 2]


def test_a_download_resumes_with_the_chunks_it_has(snapshot, tmp_path):
    first = Assembler(snapshot.index, tmp_path)
    first.add(1, snapshot.chunk(1))
    first.add(2, snapshot.chunk(2))
    again = Assembler(snapshot.index, tmp_path)
    assert again.missing() == [0]
    again.add(0, snapshot.chunk(0))
    assert same(again.tensors(), flat(make_tensors()))
    assert list(tmp_path.iterdir()) == []


def test_chunks_damaged_on_the_disk_are_fetched_again(snapshot, tmp_path):
    assembler = Assembler(snapshot.index, tmp_path)
    for number in range(3):
        assembler.add(number, snapshot.chunk(number))
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[CHUNK_NBYTES + 7] ^= 1
    file.write_bytes(data)
    assert Assembler(snapshot.index, tmp_path).missing() == [1]
    file.write_bytes(data[: CHUNK_NBYTES // 2])
    assert Assembler(snapshot.index, tmp_path).missing() == [0, 1, 2]
    file.write_bytes(data + b"more")
    assert Assembler(snapshot.index, tmp_path).missing() == [0, 1, 2]


def test_downloads_of_older_snapshots_are_removed(snapshot, tmp_path):
    Assembler(Snapshot(make_tensors(), {"round": 40}).index, tmp_path)
    Assembler(snapshot.index, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{snapshot.index.digest.hex()}.partial"]


def test_a_download_folder_that_cannot_be_made_is_a_disk_error(snapshot, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="preparing the download folder"):
        Assembler(snapshot.index, tmp_path / "file")


def test_a_cut_index_is_refused_and_a_flipped_byte_is_or_names_another_snapshot(snapshot):
    data, layout = snapshot.index.to_bytes(), snapshot.index.layout
    for length in range(len(data)):
        with pytest.raises(PayloadError):
            SnapshotIndex.from_bytes(data[:length], layout)
    for place in range(len(data)):
        try:
            other = SnapshotIndex.from_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], layout)
        except PayloadError:
            continue
        assert other.digest != snapshot.index.digest


def test_the_bound_on_an_index_holds(snapshot):
    largest = {"x": "y" * (MAX_META_NBYTES - 8)}
    assert len(json.dumps(largest, separators=(",", ":"))) == MAX_META_NBYTES
    tight = Snapshot(make_tensors(), largest).index
    assert len(tight.to_bytes()) == SnapshotIndex.max_nbytes(tight.layout)
    with pytest.raises(ConfigError, match=f"at most {MAX_META_NBYTES}"):
        Snapshot(make_tensors(), {"x": "y" * MAX_META_NBYTES})
    with pytest.raises(ConfigError, match=r"half is torch\.float16"):  # only float32 is shared
        Snapshot({"half": torch.zeros(2).half()}, {})


def test_golden_bytes_of_an_index():
    index = Snapshot({"b": torch.tensor([1.0, -2.0]), "a": torch.tensor([0.5])}, {"round": 3}).index
    assert index.to_bytes()[:8].hex() == "4443534e01000000"
    assert index.to_bytes()[40:].hex() == GOLDEN_TAIL
    assert Snapshot({"b": torch.tensor([1.0, -2.0]), "a": torch.tensor([0.5])}, {}).chunk(0).hex() == (
        "0000003f0000803f000000c0"
    )


GOLDEN_TAIL = (
    "010000000b0000007b22726f756e64223a337d"  # one chunk, 11 bytes of JSON: {"round":3}
    "5f42e7995817a0b2f771853a3f2d4ec45b28568861fada8e10640081508215f1"
)
