"""The built-in language model in a size that was asked for."""

import pytest

from decentral.errors import ConfigError
from decentral.tasks.language_model import num_parameters
from decentral.tasks.sizing import config_of_size, parameters_of


@pytest.mark.parametrize("asked", [100_000, 635_776, 10**6, 3 * 10**7, 125 * 10**6, 10**9, 7 * 10**9])
def test_a_model_of_about_that_size_and_of_a_usual_shape(asked: int) -> None:
    config = config_of_size(asked)
    assert parameters_of(config) == pytest.approx(asked, rel=0.05)
    assert parameters_of(config) == num_parameters(config)
    if asked >= 10**7:
        assert 30 < config.hidden / config.layers < 130


def test_sizes_that_it_cannot_have_are_refused_with_those_that_it_can() -> None:
    for asked in (1000, 10**14):
        with pytest.raises(ConfigError, match=r"the built-in language model has from 21,600 to some 825B; take"):
            config_of_size(asked)
