"""The table of methods in docs/optimizers.md: a row for each that the package has, and what each row says is so."""

import re
from pathlib import Path

import pytest
import torch

from decentral.optimizers import Channel, make_outer, presets

PAGE = (Path(__file__).parents[2] / "docs/optimizers.md").read_text(encoding="utf-8")
NUMEL = 1000


def named(channel: Channel) -> str:
    return f"`{channel.name}`" + (f" every {channel.every}" if channel.every > 1 else "")


def row(name: str) -> str:
    """What the table says of a method with its default keys."""
    method = make_outer(name, {})
    held = sum(tensor.numel() for tensor in method.init(torch.zeros(NUMEL)).values())
    per_parameter, more = divmod(held, NUMEL)
    state = f"{per_parameter}" + (f", and {more} in all" if more else "")
    channels = ", ".join(named(channel) for channel in method.channels())
    return f"| `{name}` | {method.topology} | {channels} | {state} | {method.source} |"


@pytest.mark.parametrize("name", sorted(presets()))
def test_the_table_says_what_a_method_sends_keeps_and_comes_from(name: str):
    assert row(name) in PAGE.splitlines()


def test_the_table_has_every_method_and_no_other():
    table = PAGE.split("## All methods")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == sorted(presets())
