"""The table of docs/optimizers.md that has every preset beside a peer alone."""

from __future__ import annotations

import re

import pytest

from decentral.optimizers import presets
from tests.kit.tables import long_but
from tests.lab.preset_table import EARLY, PAGE, STEPS, alone, terms_of, together, written

FEW = ["demo_sgd"]
ENDS = ("co2", "edit", "noloco", "streaming")  # a loop of each kind; tens of seconds each
MOST_BEHIND = 3
WRITTEN = written()
CLOSE = 0.03  # of a figure: another machine's last bits make other ones


def test_the_table_has_every_preset_once() -> None:
    assert list(WRITTEN) == list(dict.fromkeys(WRITTEN))
    assert set(WRITTEN) == set(presets())


def test_every_preset_is_better_than_a_peer_alone_or_says_that_it_is_not() -> None:
    behind = {name for name, (_, late, single) in WRITTEN.items() if late >= single}
    assert behind == {name for name, preset in presets().items() if preset.behind}
    assert len(behind) <= MOST_BEHIND


@pytest.mark.parametrize("name", [name for name, preset in presets().items() if preset.behind])
def test_what_init_says_of_a_preset_is_on_its_page_too(name: str) -> None:
    (page,) = re.findall(rf"\| `{name}` \| \[[\w-]+\]\((methods/\w+\.md)#{name}\)", PAGE.read_text(encoding="utf-8"))
    text = " ".join((PAGE.parent / page).read_text(encoding="utf-8").split())
    assert presets()[name].behind in text.split(f"## `{name}`")[1]


@pytest.mark.parametrize("name", long_but(FEW, list(presets())))
def test_a_preset_begins_as_the_table_has_it(name: str) -> None:
    assert together(terms_of(name), EARLY) == [pytest.approx(WRITTEN[name][0], rel=CLOSE)]


@pytest.mark.long
@pytest.mark.parametrize("name", ENDS)
def test_a_preset_ends_as_the_table_has_it(name: str) -> None:
    terms = terms_of(name)
    assert [*together(terms, STEPS), alone(terms.inner)] == pytest.approx(WRITTEN[name][1:], rel=0.1)
