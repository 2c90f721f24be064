"""Encoding a fragment: on one thread or several, and what a NaN is answered with."""

import pytest
import torch

from decentral.compressors import parse_compressor
from decentral.compressors.feedback import ErrorFeedback
from decentral.errors import NonFiniteError
from decentral.optimizers.diloco import DiLoCo
from decentral.parameters import Fragment, ParameterSpec, schema_of
from decentral.replica.codec import Codec
from decentral.replica.contribution import encode_range, encode_whole
from decentral.replica.replica import Replica
from decentral.tensors import threads


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Codec(parse_compressor("topk(k=64, chunk=4096) >> signmag2"), ErrorFeedback(0.95))
    shapes = ((64, 130), (999,), (3, 5, 7), (4096,))
    gradient = torch.randn(64 * 130 + 999 + 105 + 4096, generator=torch.Generator().manual_seed(0))
    alone = codec.encode(gradient, {"debt": gradient}, shapes)
    monkeypatch.setattr(threads, "WORTH_IT", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    together = codec.encode(gradient, {"debt": gradient}, shapes)
    assert together.body == alone.body
    assert torch.equal(together.feedback["debt"], alone.feedback["debt"])


def test_an_error_on_a_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "WORTH_IT", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with pytest.raises(NonFiniteError):
        Codec(parse_compressor("int8")).encode(torch.tensor([1.0, float("nan")]), {}, ((1,), (1,)))


def test_a_pool_of_threads_works_in_the_callers_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "WORTH_IT", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    codec = Codec(parse_compressor("topk(k=64, chunk=4096) >> signmag2"), ErrorFeedback(0.95))
    with torch.inference_mode():
        found = codec.encode(torch.ones(99), {}, ((33,), (33,), (33,)))
    assert found.feedback["debt"].shape == (99,)


@pytest.mark.parametrize("how", ["whole", "range"])
def test_a_nan_is_refused_by_the_name_of_its_parameter_and_changes_nothing(how: str) -> None:
    schema = schema_of(
        {"embedding": torch.zeros(4, 2, requires_grad=True), "head.weight": torch.zeros(3, requires_grad=True)}
    )
    codec = Codec(parse_compressor("int8"), ErrorFeedback(0.95))
    replica = Replica(schema, [torch.zeros(11)], DiLoCo(), codec, codec)
    gradient = torch.ones(11)
    gradient[9] = float("nan")
    with pytest.raises(NonFiniteError, match=r"pseudo-gradient of head\.weight; nothing was sent"):
        encode_whole(replica, 0, gradient) if how == "whole" else encode_range(replica, 0, gradient, 0, 11)
    assert replica.feedback == [{}]


MANY_SMALL = tuple((2, 4) for _ in range(1000))


@pytest.mark.parametrize("chain", ["topk(k=64, chunk=4096) >> signmag2", "int8(block=4096)", "none"])
def test_a_thousand_small_parameters_take_no_more_than_one_of_as_many_values(chain: str) -> None:
    codec = Codec(parse_compressor(chain), ErrorFeedback(0.95))
    fragment = fragment_of(MANY_SMALL)
    gradient = torch.randn(fragment.numel, generator=torch.Generator().manual_seed(0))
    made = codec.encode(gradient, {}, codec.cut(fragment))
    assert bytes(made.body) == bytes(codec.encode(gradient, {}, ((fragment.numel,),)).body)
    assert len(made.payloads) == 1
    assert codec.decode(made.body, codec.cut(fragment)).shape == gradient.shape


def test_what_factors_matrices_sees_each_of_them() -> None:
    fragment = fragment_of(tuple((64, 64) for _ in range(1000)))
    assert Codec(parse_compressor("lowrank(rank=4)")).cut(fragment) == fragment.shapes
    beside = Codec(parse_compressor("int8"), beside=parse_compressor("lowrank(rank=4)"))
    assert beside.cut(fragment) == fragment.shapes


def fragment_of(shapes: tuple[tuple[int, ...], ...]) -> Fragment:
    return Fragment(0, tuple(ParameterSpec(f"{n}", shape) for n, shape in enumerate(shapes)))
