"""Many tensors at once decode to what one at a time does."""

import pytest
import torch

from decentral.compressors import parse_compressor
from decentral.compressors.feedback import ErrorFeedback, add_sent
from decentral.errors import NonFiniteError
from decentral.parameters import split
from tests.laws.conftest import DEVICES

SHAPES = ((64, 64), (130, 70), (70,), (192, 128), (4097,), (3, 5, 7), (1, 1), (64, 200), (0, 4), ())
CHAINS = ["topk(k=64, chunk=4096) >> signmag2", "topk(k=4, chunk=256) >> int8", "topk(k=8, chunk=1024)", "topk >> sign"]


def gaussian(device: str) -> torch.Tensor:
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spelling", CHAINS)
def test_payloads_are_those_of_one_tensor_at_a_time(spelling: str, device: str):
    chain, flat_N = parse_compressor(spelling), gaussian(device)
    found = chain.compress_flat(flat_N, SHAPES)
    for payload, tensor in zip(found, split(flat_N, SHAPES), strict=True):
        alone = chain.compress(tensor)
        assert payload.shape == alone.shape
        assert [(p.dtype, p.shape) for p in payload.parts] == [(p.dtype, p.shape) for p in alone.parts]
        torch.testing.assert_close(chain.decompress(payload), chain.decompress(alone), rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spelling", CHAINS)
def test_adding_at_once_adds_what_a_receiver_decodes(spelling: str, device: str):
    chain, flat_N = parse_compressor(spelling), gaussian(device)
    payloads = chain.compress_flat(flat_N, SHAPES)
    one_N, other_N = flat_N.clone(), flat_N.clone()
    assert chain.add_flat(one_N, payloads, -1.0)
    for piece, payload in zip(split(other_N, SHAPES), payloads, strict=True):
        piece -= chain.decompress(payload)
    assert torch.equal(one_N, other_N)


@pytest.mark.parametrize("device", DEVICES)
def test_the_debt_made_on_a_device_is_what_receivers_lack(device: str):
    chain, flat_N = parse_compressor(CHAINS[0]), gaussian(device)
    sending = ErrorFeedback(beta=1.0)._send_from_device(chain, flat_N, {"debt": flat_N * 0.5}, SHAPES)
    arrived_N = torch.zeros(flat_N.numel())
    here = [type(one)(one.shape, tuple(part.cpu() for part in one.parts)) for one in sending.payloads]
    add_sent(chain, arrived_N, here)
    torch.testing.assert_close(arrived_N + sending.state["debt"].cpu(), (flat_N * 1.5).cpu())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_and_inf_are_refused(poison: float, device: str):
    flat_N = gaussian(device)
    flat_N[5000] = poison
    with pytest.raises(NonFiniteError):
        parse_compressor(CHAINS[0]).compress_flat(flat_N, SHAPES)


def test_a_sparsifier_that_takes_one_at_a_time_says_so():
    chain = parse_compressor("randk >> signmag2")
    assert chain.compress_flat(gaussian("cpu"), SHAPES) is None
    assert not chain.add_flat(gaussian("cpu"), [], 1.0)
