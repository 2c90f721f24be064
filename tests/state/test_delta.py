"""A folder of anchors: whole files only, the newest K, and deltas that lead from one to the next."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from decentral.errors import BaseMismatch, ConfigError, DiskError, PayloadError
from decentral.state import delta
from decentral.state.delta import AnchorFolder, apply_delta, make_delta, read_header, version_id
from decentral.state.durable import Disk


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(40, 30, generator=generator), "count": torch.tensor(seed)}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_newest_k_are_kept_and_latest_names_the_newest(tmp_path: Path) -> None:
    anchors = AnchorFolder(tmp_path / "anchors", 2, wall=lambda: 1234.5678)
    for round_ in (3, 6, 9):
        anchors.write(round_, f"{round_:02x}" * 32, tensors(round_), {"final": round_ == 9})
    assert names(anchors.folder) == {"round-000006.safetensors", "round-000009.safetensors", "latest.json"}
    found = json.loads((anchors.folder / "latest.json").read_text())
    wanted = {"version": 1, "round": 9, "digest": "09" * 32, "file": "round-000009.safetensors", "delta": None}
    assert found == wanted | {"time": 1234.568, "final": True}
    assert anchors.latest() == found
    loaded = load_file(anchors.folder / found["file"])
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors(9).items())


def test_a_delta_leads_from_each_anchor_to_the_next_to_the_bit(tmp_path: Path) -> None:
    anchors = AnchorFolder(tmp_path, 3, deltas=True)
    before = tensors(0)
    anchors.write(1, "", before, {})
    after = {"w": before["w"].clone(), "count": torch.tensor(7)}
    after["w"][3, :2] += 1.0
    anchors.write(2, "", after, {})
    found = anchors.latest()
    assert found is not None
    assert found["delta"] == {"file": "round-000002.delta", "since": 1}
    message = (tmp_path / "round-000002.delta").read_bytes()
    assert len(message) < 400, "of 4,808 bytes"
    there = apply_delta(load_file(tmp_path / "round-000001.safetensors"), message)
    assert all(torch.equal(there[name], tensor) for name, tensor in after.items())
    for round_ in (3, 4, 5):
        anchors.write(round_, "", tensors(round_), {})
        found = anchors.latest()
        assert found is not None
        assert found["delta"] == {"file": f"round-{round_:06d}.delta", "since": round_ - 1}
        there = apply_delta(there, (tmp_path / found["delta"]["file"]).read_bytes())
        assert all(torch.equal(there[name], tensor) for name, tensor in tensors(round_).items())
    assert not {"round-000001.safetensors", "round-000002.delta"} & names(tmp_path)


def test_rounds_of_a_branch_that_was_given_up_go(tmp_path: Path) -> None:
    anchors = AnchorFolder(tmp_path, 3)
    for round_ in (7, 8, 9, 8):
        anchors.write(round_, f"{round_}", tensors(round_), {})
    assert names(tmp_path) == {"round-000007.safetensors", "round-000008.safetensors", "latest.json"}


class FullDisk(Disk):
    def sync_folder(self, path: Path) -> None:
        raise OSError(28, "No space left on device")


def test_on_a_full_disk_what_was_there_stays_and_is_still_the_latest(tmp_path: Path) -> None:
    AnchorFolder(tmp_path, 1).write(1, "a", tensors(1), {})
    with pytest.raises(DiskError, match="No space left"):
        AnchorFolder(tmp_path, 1, disk=FullDisk()).write(2, "b", tensors(2), {})
    found = AnchorFolder(tmp_path, 1).latest()
    assert found is not None
    assert found["round"] == 1
    AnchorFolder(tmp_path, 1).write(3, "c", tensors(3), {})
    assert names(tmp_path) == {"round-000003.safetensors", "latest.json"}


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"file": 3}', '{"file": "gone.safetensors"}'])
def test_a_latest_that_leads_nowhere_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "latest.json").write_text(text)
    assert AnchorFolder(tmp_path, 1).latest() is None


# ---- test delta ----
#
# A delta gives the exact bits, says what it belongs to, and believes nothing that it is told.

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int64, torch.bool]
HEADER_NBYTES = 4 + 1 + 32 + 32


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bits(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    seen = [[(name, t.dtype, t.shape, bits(t)) for name, t in tensors.items()] for tensors in (one, other)]
    return seen[0] == seen[1]


def weights(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, Tensor]:
    made = {"b": (300, 70), "a": (70,), "scalar": (), "none": (0, 3), "conv": (3, 5, 7, 11)}
    drawn = [torch.randn(shape, generator=generator(seed + i)) * 0.02 for i, shape in enumerate(made.values())]
    return {name: tensor.to(dtype) for name, tensor in zip(made, drawn, strict=True)}


def stepped(tensors: dict[str, Tensor], share: float, seed: int = 1) -> dict[str, Tensor]:
    """Some elements one step up or down, as a small update leaves bfloat16."""
    found = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        whole = tensor.clone().view(torch.int16)
        drawn = torch.rand(tensor.shape, generator=generator(seed + i)) < share
        up = torch.randint(0, 2, tensor.shape, generator=generator(seed + i), dtype=torch.int16) * 2 - 1
        found[name] = torch.where(drawn, whole + up, whole).view(tensor.dtype)
    return found


def redrawn(tensors: dict[str, Tensor], share: float, seed: int = 1) -> dict[str, Tensor]:
    """Some elements anew: what a delta gains least from."""
    found = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        drawn = torch.rand(tensor.shape, generator=generator(seed + i)) < share
        new = (torch.randn(tensor.shape, generator=generator(seed + i + 50)) * 0.02).to(tensor.dtype)
        found[name] = torch.where(drawn, new, tensor)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 1.0])
def test_the_result_has_the_senders_bits_and_the_base_is_untouched(dtype: torch.dtype, share: float):
    base = weights(dtype)
    if dtype in (torch.int8, torch.int64, torch.bool):
        base = {name: torch.randint(0, 2, t.shape, generator=generator()).to(dtype) for name, t in base.items()}
    target = redrawn(base, share)
    before = {name: tensor.clone() for name, tensor in base.items()}
    data = make_delta(base, target)
    found = apply_delta(base, data)
    assert equal(found, target)
    assert equal(base, before)
    assert read_header(data).base == version_id(base)
    assert read_header(data).result == version_id(target)
    next(iter(found.values())).fill_(1)  # new memory
    assert equal(base, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_pattern_of_bits_arrives_nan_payloads_and_minus_zero_too(dtype: torch.dtype):
    whole = torch.int16 if dtype.itemsize == 2 else torch.int32
    info = torch.iinfo(whole)
    old = torch.randint(info.min, info.max + 1, (5000,), generator=generator(), dtype=torch.int64)
    new = torch.randint(info.min, info.max + 1, (5000,), generator=generator(1), dtype=torch.int64)
    new[:4000] = old[:4000]
    new[0], old[0] = 0, info.min  # 0 and minus zero
    base, target = ({"w": values.to(whole).view(dtype)} for values in (old, new))
    assert torch.isnan(target["w"].float()).any()
    data = make_delta(base, target)
    assert not read_header(data).full
    assert equal(apply_delta(base, data), target)


def test_no_change_takes_a_header_and_little_else():
    base = weights()
    assert len(make_delta(base, base)) <= HEADER_NBYTES + 4 * len(base) + 3 * 4
    assert equal(apply_delta(base, make_delta(base, base)), base)
    assert equal(apply_delta({}, make_delta({}, {})), {})


def test_a_percent_of_single_steps_in_bfloat16_costs_a_hundredth_and_a_half_of_all_bits():
    base = {"w": (torch.randn(1000, 1000, generator=generator()) * 0.02).bfloat16()}
    data = make_delta(base, stepped(base, 0.01))
    changed = 10_000
    assert 8 * len(data) < 9.6 * changed  # 8.1 for the place, 1 for the direction
    assert len(data) < 2_000_000 / 160


def test_another_base_is_refused_by_type_and_untouched():
    base, target = weights(), stepped(weights(), 0.1)
    data = make_delta(base, target)
    for other in (target, weights(seed=9), {name: base[name] for name in ("a", "b")}):
        with pytest.raises(BaseMismatch, match="ask for the full version"):
            apply_delta(other, data)


def test_a_minus_zero_in_the_base_is_another_base():
    data = make_delta({"w": torch.zeros(1000)}, {"w": torch.eye(1000)[0]})
    with pytest.raises(BaseMismatch):
        apply_delta({"w": -torch.zeros(1000)}, data)


def test_all_bits_are_sent_when_that_is_shorter_and_need_no_base_but_its_schema():
    base, target = weights(), redrawn(weights(), 1.0)
    data = make_delta(base, target)
    assert read_header(data).full
    assert len(data) < sum(2 * tensor.numel() for tensor in base.values())
    assert equal(apply_delta(weights(seed=77), data), target)


def test_the_order_of_names_does_not_matter_to_ids_and_is_the_bases_in_results():
    base, target = weights(), stepped(weights(), 0.1)
    turned = dict(reversed(base.items()))
    assert version_id(turned) == version_id(base)
    assert equal(apply_delta(turned, make_delta(base, target)), dict(reversed(target.items())))


def test_break_even_with_all_bits_is_at_nine_tenths_anew_and_never_for_single_steps():
    """With 32-bit places and raw values it would be at a third of the elements."""
    base = {"w": (torch.randn(300, 1000, generator=generator()) * 0.02).bfloat16()}
    full = {share: read_header(make_delta(base, redrawn(base, share))).full for share in (0.3, 0.6, 0.85, 0.97)}
    assert full == {0.3: False, 0.6: False, 0.85: False, 0.97: True}
    assert len(make_delta(base, redrawn(base, 0.1))) < 600_000 / 9.5
    for share in (0.3, 0.6, 0.85, 0.97, 1.0):
        data = make_delta(base, stepped(base, share))
        assert not read_header(data).full
        assert len(data) < 600_000 / 9.5


def test_versions_that_differ_in_more_than_bits_are_refused():
    base = weights()
    for target, message in (
        ({name: base[name] for name in ("a", "b")}, "other tensors"),
        ({**base, "a": base["a"].float()}, "tensor a changed its dtype or shape"),
        ({**base, "b": base["b"].t()}, "tensor b changed its dtype or shape"),
        ({**base, "c": base["a"]}, r"other tensors \(c\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_delta(base, target)


def test_a_dtype_without_a_name_is_refused():
    with pytest.raises(ConfigError, match=r"cannot hold torch\.complex64"):
        version_id({"w": torch.ones(2, dtype=torch.complex64)})


def test_groups_cut_by_size_give_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(delta, "_GROUP", 100)
    for target in (stepped(weights(), 0.1), redrawn(weights(), 1.0)):
        assert equal(apply_delta(weights(), make_delta(weights(), target)), target)


def test_versions_that_share_memory_or_are_views_are_read_as_they_look():
    whole = torch.randn(40, 60, generator=generator())
    base, target = {"w": whole.t()}, {"w": whole.t() * 2}
    assert equal(apply_delta(base, make_delta(base, target)), {"w": target["w"].contiguous()})


def messages() -> list[bytes]:
    return [make_delta(weights(), change(weights(), share)) for change, share in ((stepped, 0.05), (redrawn, 1.0))]


@pytest.mark.parametrize("which", [0, 1])
def test_every_cut_and_every_byte_too_many_is_refused(which: int):
    data = messages()[which]
    for size in {*range(150), *range(0, len(data), 61), len(data) - 1}:
        with pytest.raises(PayloadError):
            apply_delta(weights(), data[:size])
    with pytest.raises(PayloadError, match="left over"):
        apply_delta(weights(), data + b"\0")


MESSAGES = messages()


@given(which=st.sampled_from([0, 1]), seed=st.integers(0, 2**32), changes=st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_changed_bytes_are_refused_and_nothing_is_returned(which: int, seed: int, changes: int):
    rng = np.random.default_rng(seed)
    data = bytearray(MESSAGES[which])
    for _ in range(changes):
        data[rng.integers(len(data))] ^= int(rng.integers(1, 256))
    try:
        found = apply_delta(weights(), bytes(data))
    except (PayloadError, BaseMismatch):
        return
    assert read_header(bytes(data)).full  # only the base's id of a full version is of no consequence
    assert equal(found, redrawn(weights(), 1.0))


@given(body=st.binary(max_size=300), form=st.sampled_from([0, 1]))
@settings(max_examples=300, deadline=None)
def test_any_bytes_behind_a_fitting_header_are_refused(body: bytes, form: int):
    data = b"DCDL" + bytes([form]) + version_id(weights()) + version_id(stepped(weights(), 0.05)) + body
    with pytest.raises(PayloadError):
        apply_delta(weights(), data)


def test_counts_beyond_the_base_are_refused_before_anything_is_made():
    base = {"w": torch.zeros(10)}
    for count in (11, 2**32 - 1):
        data = b"DCDL\0" + version_id(base) * 2 + count.to_bytes(4, "little") + bytes(100)
        with pytest.raises(PayloadError, match="more elements change than there are"):
            apply_delta(base, data)


def test_a_change_to_what_was_is_refused():
    """Else one result would have many spellings."""
    base = {"w": torch.zeros(10, dtype=torch.uint8)}
    body = (1).to_bytes(4, "little") + bytes(4) + b"\3" + bytes(4) + b"\0"
    with pytest.raises(PayloadError, match="changes to what it was"):
        apply_delta(base, b"DCDL\0" + version_id(base) * 2 + body)


def test_golden_bytes():
    """These bytes are a format that is stored and sent; a change needs a new magic."""
    base = {"w": torch.zeros(1000, dtype=torch.bfloat16)}
    target = {"w": base["w"].clone()}
    target["w"][7], target["w"][900] = 1.0, -0.0
    assert make_delta(base, target).hex() == GOLDEN


GOLDEN = (
    "4443444c00a22cb9d5272ecfde67c295d2a3293cb454a187bd11e26d58aa7b7e091d9745e4f4edcf8af755d3288f77938913"
    "8064321dd3fe69e3e2f9b58618723dd950ac40020000000000000007100e0000000000ff000000007fff"
)
