"""DeMo: the senders' momentum is feedback and compressor, and the outer step is a sign."""

import torch

from decentral.compressors import parse_compressor, parse_feedback
from decentral.compressors.base import add_flat
from decentral.optimizers.demo_sgd import DeMoSGD
from tests.kit.stepping import step

SHAPES = ((64, 64),)
NUMEL = 4096


def gaussian(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def sent(compressor: str, feedback: str, changes: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What arrives of each change, and what is left in the sender's momentum."""
    books: dict[str, torch.Tensor] = {}
    arrived = []
    for change in changes:
        sending = parse_feedback(feedback).send(parse_compressor(compressor), change, books, SHAPES)
        arrived.append(torch.zeros(NUMEL))
        add_flat(parse_compressor(compressor), arrived[-1], sending.payloads)
        books = sending.state
    return arrived, books["debt"]


def test_what_is_sent_and_what_is_left_are_the_decayed_sum_of_the_changes():
    """a <- beta*a + change ; a <- a - q, the momentum that no peer shares."""
    beta, changes = 0.9, [gaussian(seed) for seed in range(12)]
    arrived, left = sent("dct(k=32, chunk=4096)", f"ef(beta={beta})", changes)
    a = torch.zeros(NUMEL, dtype=torch.float64)
    for change, q in zip(changes, arrived, strict=True):
        a = beta * a + change.double() - q.double()
    torch.testing.assert_close(left.double(), a, rtol=0, atol=1e-3)
    assert 0 < float(arrived[-1].norm()) < float(a.norm())


def test_with_all_coefficients_nothing_is_left_and_the_step_is_the_sign_of_the_change():
    change, x = gaussian(1), gaussian(2)
    (arrived,), left = sent("dct(k=4096, chunk=4096)", "ef(beta=0.999)", [change])
    assert float(left.abs().max()) < 1e-3
    clear = change.abs() > 1e-2
    after, state = step(DeMoSGD(lr=0.5), x, arrived, {})
    assert state == {}
    assert torch.equal(after[clear], (x - 0.5 * change.sign())[clear])


def test_every_coordinate_moves_by_the_rate_and_a_mean_of_zero_stays():
    change = torch.tensor([3.0, -1e-30, 0.0, -0.0, 1e30])
    after, _ = step(DeMoSGD(lr=0.25), torch.zeros(5), change, {})
    assert after.tolist() == [-0.25, 0.25, 0.0, 0.0, -0.25]


def test_near_the_optimum_of_a_quadratic_it_goes_to_and_fro_by_no_more_than_the_rate():
    x = torch.linspace(-1, 1, 50, dtype=torch.float64)
    for _ in range(150):
        x, _ = step(DeMoSGD(lr=0.01), x, 0.5 * x, {})
    assert float(x.abs().max()) <= 0.01 + 1e-12
