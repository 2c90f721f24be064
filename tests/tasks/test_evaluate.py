import math
from types import SimpleNamespace

import pytest
import torch

from decentral.errors import DataError
from decentral.tasks.evaluate import bits_per_byte, held_out_windows
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import LanguageModelConfig

HELD_OUT = (torch.arange(3000) * 13 % 256).to(torch.uint8)


class Constant(torch.nn.Module):
    """Says the same probabilities whatever came before."""

    def __init__(self, probabilities):
        super().__init__()
        self.logits = torch.nn.Parameter(probabilities.log())

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, 256))


def test_knowing_nothing_is_eight_bits_per_byte():
    model = Constant(torch.full((256,), 1 / 256))
    assert bits_per_byte(model, HELD_OUT, context=32) == pytest.approx(8.0, abs=1e-5)


def test_a_known_distribution_gives_its_cross_entropy():
    probabilities = torch.full((256,), 0.5 / 255)
    probabilities[7] = 0.5
    held_out = torch.tensor([7, 7, 7, 9] * 100, dtype=torch.uint8)
    expected = 0.75 + 0.25 * math.log2(255 / 0.5)
    windows = bits_per_byte(Constant(probabilities), held_out, context=401 - 1, num_windows=1)
    exact = (299 * 1 + 100 * math.log2(255 / 0.5)) / 399  # the first byte of a window is not predicted
    assert windows == pytest.approx(exact, rel=1e-5)
    assert windows == pytest.approx(expected, rel=0.01)


def test_evaluation_is_the_same_every_time_and_hardly_depends_on_the_batch_size():
    model = build_language_model(LanguageModelConfig(hidden=16, layers=1, heads=1, context=32), seed=0)
    one = bits_per_byte(model, HELD_OUT, context=32, num_windows=12, batch_size=5)
    assert one == bits_per_byte(model, HELD_OUT, context=32, num_windows=12, batch_size=5)
    assert one == pytest.approx(bits_per_byte(model, HELD_OUT, context=32, num_windows=12, batch_size=12), rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_in_the_mode_it_was_in_without_gradients(training):
    model = build_language_model(LanguageModelConfig(hidden=16, layers=1, heads=1, context=32), seed=0).train(training)
    bits_per_byte(model, HELD_OUT, context=32, num_windows=2)
    assert model.training is training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_windows_reach_from_the_first_byte_to_the_last():
    windows = held_out_windows(HELD_OUT, context=100, num_windows=7)
    assert torch.equal(windows[0], HELD_OUT[:100].long())
    assert torch.equal(windows[-1], HELD_OUT[-100:].long())
    assert held_out_windows(HELD_OUT, context=3000, num_windows=1).shape == (1, 3000)


def test_a_slice_shorter_than_a_window_is_one_line():
    with pytest.raises(DataError, match="one window needs 3001"):
        held_out_windows(HELD_OUT, context=3001, num_windows=1)
