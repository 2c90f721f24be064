"""What a caller of ``decentral.join`` may pass for a rate or a size."""

import math
from pathlib import Path

import pytest
import torch

import decentral
from decentral.errors import ConfigError
from decentral.manifest import preset_manifest
from decentral.quantities import rate_of, size_of


@pytest.mark.parametrize(("given", "rate"), [(None, None), ("5mbit", 625_000.0), (625_000, 625_000), (1e6, 1e6)])
def test_a_rate_is_a_spelling_of_the_command_line_or_bytes_per_second(given: object, rate: float | None) -> None:
    assert rate_of(given, "max_upload") == rate


@pytest.mark.parametrize(("given", "nbytes"), [(None, None), ("20GB", 20 * 10**9), (5000, 5000), (2e9, 2 * 10**9)])
def test_a_size_is_a_spelling_of_the_command_line_or_bytes(given: object, nbytes: int | None) -> None:
    assert size_of(given, "daily_upload") == nbytes


@pytest.mark.parametrize("given", ["5mb/h", "", "fast", 0, -1, True, math.nan, math.inf, b"5mbit", ["5mbit"]])
def test_anything_else_is_refused_with_the_way_out(given: object) -> None:
    with pytest.raises(ConfigError, match=r"join\(max_upload=.*write it as 20mbit or 2.5MB/s"):
        rate_of(given, "max_upload")
    with pytest.raises(ConfigError, match=r"join\(daily_upload=.*write it as 50GB or 800MB"):
        size_of(given, "daily_upload")


def joined(out: Path, **limits: object) -> decentral.Peer:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    return decentral.join(preset_manifest("diloco"), model, optimizer, out=out, **limits, alone=True)  # type: ignore[arg-type]


def test_join_takes_what_the_command_line_takes(tmp_path: Path) -> None:
    settings = joined(tmp_path, max_upload="5mbit", max_download="2.5MB/s", daily_upload="20GB").settings
    assert (settings.caps.up, settings.caps.down, settings.daily_upload) == (625_000.0, 2_500_000.0, 20 * 10**9)


def test_join_refuses_a_rate_that_is_none_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"join\(max_upload='fast'\)"):
        joined(tmp_path / "run", max_upload="fast")
    assert not (tmp_path / "run").exists()
