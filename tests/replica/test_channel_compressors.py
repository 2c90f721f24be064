"""Channels beside the change with a compressor of their own: what arrives, what it takes, and hostile bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decentral.compressors import parse_compressor, parse_feedback
from decentral.errors import ConfigError, PayloadError
from decentral.manifest import Manifest, preset_manifest
from decentral.node.node import largest_offer, make_replica
from decentral.optimizers import CHANGE, Channel, compressor_beside, make_outer
from decentral.parameters import Schema, schema_of
from decentral.replica.apply import outer_step
from decentral.replica.codec import Codec, Shapes, codec_of
from decentral.replica.contents import NO_TAIL, FrameContents, Unpacked
from decentral.replica.contribution import Contribution, Outbox, encode_range
from decentral.replica.replica import Replica
from decentral.rounds.frame_io import Inbox
from decentral.wire import body
from decentral.wire.frames import Frame, FrameKind, seal
from decentral.wire.keys import Signer
from tests.kit.builders import header
from tests.kit.machines import START, record, signer_of

SHAPES = ((64, 64), (100,), ())
NUMEL = 64 * 64 + 101
CHANNELS = 3
SPARSE = "topk(k=64, chunk=4096) >> signmag2"
CHAINS = ["none", "fp16", "bf16", "int8(block=64)", "e3m0(block=32)", SPARSE, "topk(k=4, chunk=64)"]


def randn(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def codec_with(chain: str, own: str | None = None, feedback: str = "none") -> Codec:
    beside = None if own is None else parse_compressor(own)
    return Codec(parse_compressor(chain), parse_feedback(feedback), beside)


def vectors() -> tuple[Tensor, list[Tensor]]:
    return randn(0), [1e-3 * randn(1), 1e-9 * randn(2).square()]


def sparse_terms(method: str = "des_loc", **outer: object) -> Manifest:
    compressor = {"chain": SPARSE, "feedback": "ef(beta=0.95)"}
    return preset_manifest(method, compressor=compressor, outer={"norm_clip": None, **outer})


def test_moments_arrive_at_bf16_accuracy_and_the_change_sparse():
    codec, (change_N, states) = codec_of(sparse_terms()), vectors()
    made = codec.encode(change_N, {}, SHAPES, states)
    assert len(made.body) <= codec.max_body_nbytes(SHAPES * CHANNELS, CHANNELS)
    found_CN = codec.decode(made.body, SHAPES * CHANNELS, CHANNELS).view(CHANNELS, -1)
    assert torch.equal(found_CN, codec.decompress(made.payloads, CHANNELS).view(CHANNELS, -1))
    assert 0 < int((found_CN[0] != 0).sum()) <= 3 * 64
    torch.testing.assert_close(found_CN[0] + made.feedback["debt"], change_N, rtol=0, atol=1e-5)
    for found_N, state_N in zip(found_CN[1:], states, strict=True):
        torch.testing.assert_close(found_N, state_N, rtol=2**-8, atol=0)


def test_what_only_the_change_takes_is_owed_and_states_leave_no_debt():
    codec, (change_N, states) = codec_with(SPARSE, "bf16", "ef(beta=0.95)"), vectors()
    alone, beside = codec.encode(change_N, {}, SHAPES), codec.encode(change_N, {}, SHAPES, states)
    assert alone.feedback.keys() == beside.feedback.keys() == {"debt"}
    assert torch.equal(alone.feedback["debt"], beside.feedback["debt"])


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("own", ["none", "bf16", "int8(block=64)"])
def test_a_body_is_the_changes_streams_and_behind_them_the_states(chain: str, own: str):
    codec, (change_N, states) = codec_with(chain, own), vectors()
    made = codec.encode(change_N, {}, SHAPES, states)
    first = codec_with(chain).encode(change_N, {}, SHAPES).body
    rest = codec_with(own).encode(states[0], {}, SHAPES, states[1:]).body
    assert bytes(made.body) == bytes(first) + bytes(rest)
    assert codec.encode(change_N, {}, SHAPES).body == first  # where no state is due


@pytest.mark.parametrize("chain", CHAINS)
def test_without_compressors_of_their_own_all_channels_share_the_streams(chain: str):
    codec, (change_N, states) = codec_with(chain), vectors()
    made = codec.encode(change_N, {}, SHAPES, states)
    assert made.body == body.encode(codec.compressor, made.payloads)
    assert codec.max_body_nbytes(SHAPES * 3, 3) == body.max_nbytes(codec.compressor, SHAPES * 3)


def test_a_golden_body_of_two_channels_has_a_prefix_for_each_compressor():
    one_N = torch.tensor([1.0, -2.0])
    shared = codec_with("none").encode(one_N, {}, ((2,),), [one_N]).body
    own = codec_with("none", "bf16").encode(one_N, {}, ((2,),), [one_N]).body
    assert shared.hex() == "00000000" + "0000803f000000c0" * 2
    assert own.hex() == "00000000" + "0000803f000000c0" + "00000000" + "803f00c0"


@pytest.mark.parametrize("chain", CHAINS)
def test_a_body_cut_or_longer_or_of_another_number_of_channels_is_refused(chain: str):
    codec, (change_N, states) = codec_with(chain, "bf16"), vectors()
    data = bytes(codec.encode(change_N, {}, SHAPES, states).body)
    first = len(codec.encode(change_N, {}, SHAPES).body)
    cut = [data[:stop] for stop in (0, first, first + 3, -1)]
    for wrong in (*cut, data + b"\0", data[first:], data[first:] + data[:first]):
        with pytest.raises(PayloadError):
            codec.decode(wrong, SHAPES * 3, 3)
    for channels in (1, 2, 4):
        with pytest.raises(PayloadError):
            codec.decode(data, SHAPES * channels, channels)


@pytest.mark.parametrize("chain", CHAINS)
@given(seed=st.integers(0, 2**32), share=st.sampled_from([0.001, 0.03, 1.0]))
@settings(max_examples=25, deadline=None)
def test_hostile_bodies_decode_to_finite_values_or_payload_error(chain: str, seed: int, share: float):
    codec, generator, shapes = codec_with(chain, "bf16"), torch.Generator().manual_seed(seed), ((70, 5),) * 2
    data = bytearray(codec.encode(randn(seed, 350), {}, shapes[:1], [randn(seed + 1, 350)]).body)
    for position in torch.randint(len(data), (max(1, int(share * len(data))),), generator=generator).tolist():
        data[position] = int(torch.randint(256, (1,), generator=generator))
    try:
        found = codec.decode(bytes(data), shapes, 2)
    except PayloadError:
        return
    assert found.shape == (700,)
    assert bool(torch.isfinite(found).all())


def test_states_that_are_not_finite_are_refused():
    change = bytes(4) + torch.ones(2).numpy().tobytes()
    state = bytes(4) + torch.tensor([1.0, float("nan")]).bfloat16().view(torch.int16).numpy().tobytes()
    codec = codec_with("none", "bf16")
    with pytest.raises(PayloadError, match="finite"):
        codec.decode(change + state, ((2,),) * 2, 2)
    with pytest.raises(PayloadError, match="finite"):
        codec.of(1).check(codec.unpack(change + state, ((2,),) * 2, 2)[1:])


def small() -> Schema:
    return schema_of({"weight": torch.zeros(64, 64, requires_grad=True)})


def test_the_largest_body_that_is_taken_has_room_for_states_that_are_larger_than_the_change():
    codec, exact = codec_with(SPARSE, "bf16"), codec_with("none")
    inbox = Inbox(small(), codec, exact, channels=CHANNELS)
    made = codec.encode(randn(0, 4096), {}, ((64, 64),), [randn(1, 4096), randn(2, 4096)])
    assert len(made.body) <= codec.max_body_nbytes(((64, 64),) * CHANNELS, CHANNELS) == inbox.limit()
    assert len(made.body) > codec_with(SPARSE).max_body_nbytes(((64, 64),) * CHANNELS)


def test_the_largest_offer_counts_states_as_they_are_compressed_whole_and_in_slices():
    replica = make_replica(sparse_terms(), small(), [torch.zeros(4096)])
    most = replica.codec.max_body_nbytes(((4096,),) * CHANNELS, CHANNELS)
    assert largest_offer(replica, gossips=False, fragments=1) == most
    assert most > replica.codec.of(0).max_body_nbytes(((4096,),)) + 2 * 2 * 4096


def test_a_run_whose_compressor_is_that_of_the_states_sends_one_section():
    assert codec_of(preset_manifest("des_loc")).beside is None
    assert codec_of(preset_manifest("diloco")).beside is None
    assert str(codec_of(sparse_terms()).beside) == "bf16"
    assert str(codec_of(sparse_terms("mt_dao", moments="int8")).beside) == str(parse_compressor("int8"))


@pytest.mark.parametrize("feedback", ["none", "ef(beta=0.95)"])
def test_an_owners_results_keep_the_states_compressor(feedback: str):
    codec = codec_with("int8(block=64)", "bf16", feedback)
    assert codec.for_results().beside == codec.beside


def test_a_replica_tells_states_by_their_own_compressor_in_slices_too():
    codec = codec_with(SPARSE, "bf16", "ef(beta=0.95)")
    replica = Replica(small(), [torch.zeros(4096)], make_outer("des_loc", {}), codec, codec_with("none"))
    made = encode_range(replica, 0, randn(0, 4096), 1000, 2000, states=[randn(1, 4096), randn(2, 4096)])
    change_N, *states = codec.decode(made.body, ((1000,),) * 3, 3).view(3, -1)
    assert int((change_N != 0).sum()) <= 64
    for number, state_N in enumerate(states, 1):
        torch.testing.assert_close(state_N, randn(number, 4096)[1000:2000], rtol=2**-8, atol=0)


def sent_by(signer: Signer, codec: Codec, kind: FrameKind, shapes: Shapes, seed: int = 0) -> Frame:
    """A change and two states in one frame."""
    states = [randn(seed + 1, 4096), randn(seed + 2, 4096)]
    made = codec.encode(randn(seed, 4096), {}, shapes, states)
    return seal(header(kind=kind, sender=signer.peer, states=2), made.body, signer)


def test_a_frame_that_found_no_room_is_read_again_to_the_same_states():
    codec, signer = codec_with(SPARSE, "bf16"), signer_of(0)
    contents = FrameContents(small(), codec, codec_with("none"), NO_TAIL, Unpacked(0))
    frame = sent_by(signer, codec, FrameKind.CONTRIBUTION, ((64, 64),))
    for channel, seed in ((1, 1), (2, 2)):
        total_N = torch.zeros(4096)
        contents.add(frame, channel, 1.0, total_N, 1.0)
        torch.testing.assert_close(total_N, randn(seed, 4096), rtol=2**-8, atol=0)


def test_a_result_that_is_read_for_the_outer_step_has_states_by_their_own_compressor():
    codec, signer = codec_with(SPARSE, "bf16"), signer_of(0)
    replica = Replica(small(), [torch.zeros(4096)], make_outer("mt_dao", {}), codec, codec_with("none"))
    frame, taken = sent_by(signer, codec, FrameKind.RESULT, ((4096,),)), record(START, {signer.peer: 1})
    named = (replace(taken.frames[0], frame=frame.hash),)
    having = tuple(replace(ref, summary=b"\x03") for ref in taken.frames)  # both moments
    reduced = replace(taken, plan=1, partition=((signer.peer, 0, 4096),), contributors=having, frames=named)
    step = outer_step(replica, reduced, {frame.hash: frame})
    assert 0 < int((step.after_N != 0).sum()) <= 64
    torch.testing.assert_close(step.state["exp_avg"], randn(1, 4096), rtol=2**-8, atol=0)


def test_what_a_given_up_round_took_is_owed_without_its_states():
    codec, gradient_N = codec_with(SPARSE, "bf16"), randn(0, 4096)
    made = Contribution(0, START.hash, -gradient_N, gradient_N, 3, 30, states=(randn(1, 4096), randn(2, 4096)))
    made.encoded = codec.encode(gradient_N, {}, ((64, 64),), made.states)
    outbox = Outbox(codec, 1 << 20)
    outbox.add(record(START, {signer_of(0).peer: 1}), made)
    owed = outbox.reclaim(0, 0, ((64, 64),))
    assert owed is not None
    assert torch.equal(owed.gradient_N, codec.decompress(made.encoded.payloads, CHANNELS)[:4096])


def test_the_first_channel_has_the_runs_compressor_and_all_others_the_same_one():
    one, other, none = Channel("a", compressor="bf16"), Channel("b", compressor="fp16"), Channel("c")
    assert compressor_beside((CHANGE, one, one)) == "bf16"
    assert compressor_beside((CHANGE, none)) is compressor_beside((CHANGE,)) is None
    with pytest.raises(ConfigError, match="the first channel has the run's"):
        compressor_beside((Channel("change", compressor="bf16"),))
    for wrong in (other, none):
        with pytest.raises(ConfigError, match=r"a: bf16.*give all channels beside the first the same one"):
            compressor_beside((CHANGE, one, wrong))
