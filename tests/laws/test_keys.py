"""Every numeric key of a method has an interval, and a value just outside is refused by the method's and its name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest

from decentral.errors import ConfigError
from decentral.optimizers import OuterMethod, make_outer
from decentral.optimizers.base import Interval
from tests.kit.tables import PRESETS, method_of

# Keys that are bounded by another key, each with a refusal below.
RELATED = {("gasloc", "pull"), ("noloco", "gamma"), ("a2cid2", "chi1"), ("a2cid2", "chi2"), ("pier", "floor"),
           ("pier", "decay_from")}  # fmt: skip
REFUSED = {
    "a2cid2 chi2=0": "want 0 < chi2 <= chi1, both finite",
    "a2cid2 chi1=1 chi2=2": "want 0 < chi2 <= chi1, both finite",
    "a2cid2 chi1=inf": "want 0 < chi2 <= chi1, both finite",
    "a2cid2 chi1=nan": "want 0 < chi2 <= chi1, both finite",
    "a2cid2 chi1=5 chi2=0.05": "replicas drift apart unless sqrt(chi1/chi2) < ",
    "decoupled mean=median": 'mean must be "radial" or "plain"',
    "delayed_nesterov spread=0.51": "spread must be in [0, 1/delay]",
    "demo_sgd step=median": "step must be sign or mean",
    "fedopt variant=sgd": "variant must be one of adam, yogi, adagrad",
    "gasloc momentum=0.5 pull=1.5": "replicas drift apart unless pull < 2*(1 - momentum**2)",
    "gasloc momentum=0.9 pull=0.381": "replicas drift apart unless pull < 2*(1 - momentum**2)",
    "gasloc momentum=0.5 pull=-0.1": "replicas drift apart",
    "gasloc momentum=0.5 pull=nan": "replicas drift apart",
    "masha choose=smallest": "choose must be largest or random",
    "noloco alpha=0.9 gamma=0.3801": "replicas drift apart unless gamma < 2*(1 - alpha**2)",
    "noloco alpha=0 gamma=2": "replicas drift apart",
    "noloco alpha=0.5 gamma=-0.1": "replicas drift apart",
    "pier floor=0.95": "floor must be in [0, momentum]",
    "pier floor=-0.1": "floor must be in [0, momentum]",
    "pier rise=200": "decay_from must be no less than rise",
    # Bounds that the declarations could have wrong.
    "a_edit seconds=0": "seconds must be in (0, 86400]; 600.0 is usual",
    "a_edit seconds=86401": "seconds must be in",
    "ad_psgd lr=-1": "lr must be above 0 and finite",
    "cgad beta2=1": "beta2 must be in [0, 1)",
    "cgad cutoff=0": "cutoff must be at least 1",
    "cgad decay=-1": "decay must be at least 0",
    "cgad eps=0": "eps must be above 0",
    "co2 bound=0": "bound must be above 0",
    "co2 penalty=0.5": "penalty must be at least 1",
    "delayed late=2": "late must be in [0, 1]",
    "delayed_nesterov delay=0": "delay must be at least 1",
    "diloco momentum=1": "diloco(momentum=1, restart=0): momentum must be in [0, 1); 0.9 is usual",
    "diloco lr=inf": "lr must be above 0 and finite",
    "diloco restart=-1": "restart must be at least 0",
    "edit clip=0": "clip must be above 0",
    "edit relative_temperature=0": "relative_temperature must be above 0",
    "edit warmup=1": "warmup must be at least 2",
    "edit relearn_after=0": "relearn_after must be at least 1",
    "fedbuff discount=9": "discount must be in [0, 8]; 1 is usual",
    "fedbuff grace=3601": "grace must be in [0, 3600]",
    "fedbuff staleness=-1": "staleness must be at least 0",
    "fedbuff wait_for=0": "wait_for must be at least 1",
    "fedopt beta1=1": "beta1 must be in [0, 1)",
    "fedopt beta2=1.5": "beta2 must be in [0, 1]",
    "fedopt tau=0": "tau must be in [1e-12, 1e12]",
    "heloco keep=1.5": "keep must be in [-1, 1]",
    "heloco most=-0.1": "most must be in [0, 1]",
    "heloco trust=inf": "trust must be at least 0 and finite",
    "heloco turn=-1": "turn must be at least 0",
    "late_merge first=1.1": "first must be in [0, 1]",
    "late_merge growth=0": "growth must be at least 1",
    "masha keep=1.1": "keep must be in [0, 1]",
    "masha parts=0": "parts must be in [1, 1048576]",
    "mt_dao slow=0": "slow must be at least 1",
    "des_loc second_moment=0": "second_moment must be at least 1",
    "muloco momentum=1": "muloco(momentum=1): momentum must be in [0, 1); 0.8 is usual",
    "noloco alpha=1": "alpha must be in [0, 1)",
    "noloco beta=0": "beta must be above 0 and finite",
    "partial_updates slices=1025": "slices must be in [1, 1024]",
    "sparta parts=1048577": "parts must be in [1, 1048576]",
    "sparta whole=-1": "whole must be at least 0",
    "spes merge_every=0": "merge_every must be at least 1",
    "spes merge_rate=1.1": "merge_rate must be in [0, 1]",
    "streaming alpha=1.1": "alpha must be in [0, 1]",
    "variance_corrected strength=1.1": "strength must be in [0, 1]",
}


@pytest.mark.parametrize(("spelling", "message"), REFUSED.items())
def test_a_key_that_cannot_be_meant_is_refused(spelling: str, message: str):
    with pytest.raises(ConfigError) as refused:
        method_of(spelling)
    assert message in str(refused.value)
    assert str(refused.value).startswith(spelling.split()[0])


def bounded(outer: OuterMethod) -> Iterator[tuple[str, Interval]]:
    for one in dataclasses.fields(outer):  # type: ignore[arg-type]  # each method is a dataclass
        if "within" in one.metadata:
            yield one.name, one.metadata["within"]


def around(within: Interval, is_whole: bool) -> tuple[list[float], list[float]]:
    """The values at the ends of an interval that are in it, and those just outside of it."""
    (low, high), inside, outside = within.ends, [], [] if is_whole else [math.nan]
    for end, is_in, away in ((low, within.text[0] == "[", -math.inf), (high, within.text[-1] == "]", math.inf)):
        if not is_in:
            outside.append(end)
            continue
        inside.append(end)
        if math.isfinite(end):
            outside.append(end + math.copysign(1, away) if is_whole else math.nextafter(end, away))
    return inside, outside


def test_a_value_just_outside_of_a_keys_interval_is_refused_in_words_and_one_at_its_ends_is_not(outer: OuterMethod):
    given = dataclasses.asdict(outer)  # type: ignore[call-overload]
    types = {one.name: str(one.type) for one in dataclasses.fields(outer)}  # type: ignore[arg-type]
    for name, within in bounded(outer):
        inside, outside = around(within, "int" in types[name])
        for value in outside:
            with pytest.raises(ConfigError) as refused:
                type(outer)(**given | {name: value})
            assert f": {name} {within}" in str(refused.value), value
        for value in inside:
            assert f": {name} {within}" not in refusal_of(type(outer), given | {name: value})


def refusal_of(method: type[OuterMethod], keys: dict[str, object]) -> str:
    """The error's words, which may be of what another key is; nothing where there is none."""
    try:
        method(**keys)
    except ConfigError as error:
        return str(error)
    return ""


def test_every_number_that_is_a_key_of_ours_has_an_interval_or_is_bounded_by_another_key():
    for name in PRESETS:
        outer = make_outer(name, {})
        kinds = {one.name for one in dataclasses.fields(outer) if "str" not in str(one.type)}  # type: ignore[arg-type]
        related = {key for method, key in RELATED if method == name}
        assert kinds == {key for key, _ in bounded(outer)} | related


@pytest.mark.parametrize(
    ("text", "words", "inside", "outside"),
    [
        ("[0, 1)", "must be in [0, 1)", (0, 0.999), (-1e-9, 1, math.nan, math.inf)),
        ("(0, inf)", "must be above 0 and finite", (1e-300, 1e300), (0, math.inf, math.nan)),
        ("(0, inf]", "must be above 0", (1, math.inf), (0, -math.inf, math.nan)),
        ("[1, inf)", "must be at least 1 and finite", (1, 10**9), (0, math.inf)),
        ("[1e-12, 1e12]", "must be in [1e-12, 1e12]", (1e-12, 1e12), (0, 1e13)),
    ],
)
def test_an_interval_is_read_as_papers_write_it(
    text: str, words: str, inside: tuple[float, ...], outside: tuple[float, ...]
):
    within = Interval(text)
    assert str(within) == words
    assert all(value in within for value in inside)
    assert not any(value in within for value in outside)
