"""The tables of all methods and of all compressors: a new one of ours is in every law, and with every preset's tests.

A method needs no line here, it is found by its name; one line more gets every law for other hyper-parameters, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from decentral.optimizers import Aggregation, OuterMethod, aggregation_names, make_aggregation, make_outer, presets

PRESETS = tuple(presets())
GOSSIPS = tuple(name for name in PRESETS if make_outer(name, {}).topology == "pair")
SYNCHRONOUS = tuple(name for name in PRESETS if name not in GOSSIPS)


def on_the_wire(name: str) -> tuple[object, ...]:
    """What of a method its exchange, its messages and its folder see: the outer step itself is none of theirs."""
    method, preset = make_outer(name, {}), presets()[name]
    states = tuple((channel.every > 1, channel.combine) for channel in method.channels()[1:])
    takes_turns = (preset.fragments > 1, preset.overlap > 0)
    return (preset.exchange, preset.feedback != "none", states, takes_turns, method.inner, method.timing.quorum > 0)


# One method of each kind that real daemons, threads and folders can tell apart: laws are over all of them.
WIRES = tuple({on_the_wire(name): name for name in reversed(PRESETS)}.values())
SYNCHRONOUS_WIRES = tuple(name for name in WIRES if name not in GOSSIPS)


def traits_of(name: str) -> set[tuple[int, object]]:
    """What is on the wire one by one: the exchange, a debt, each kind of state that is sent, and so on."""
    exchange, owes, states, takes_turns, *others = on_the_wire(name)
    assert isinstance(states, tuple)
    assert isinstance(takes_turns, tuple)
    whole = (exchange, owes, *takes_turns, *others)
    return {*enumerate(whole), *((len(whole), state) for state in states)}


def covering(names: Sequence[str]) -> tuple[str, ...]:
    """Few of ``names`` that have every trait which one of all has; whichever adds most comes next."""
    chosen, missing = list[str](), set[tuple[int, object]]().union(*map(traits_of, names))
    while missing:
        chosen.append(max(names, key=lambda name: len(traits_of(name) & missing)))
        missing -= traits_of(chosen[-1])
    return tuple(chosen)


def long_but(few: Sequence[object], names: Sequence[object]) -> list[Any]:  # Any: pytest does not name what it takes
    """For ``parametrize``: ``make test`` tries ``few``, and ``make test-long`` the rest of ``names``."""
    return [name if name in few else pytest.param(name, marks=pytest.mark.long) for name in names]


def rows_but(few: Sequence[tuple[Any, ...]], rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The same for rows of several values."""
    return [row if row in few else pytest.param(*row, marks=pytest.mark.long) for row in rows]


DOSED_WIRES = long_but(covering(SYNCHRONOUS_WIRES), SYNCHRONOUS_WIRES)

# By method the spelling without momentum at rate 1: its anchor is the mean of what contributors trained to.
NEUTRAL = {
    "cgad": "cgad lr=1099511627776 eps=1099511627776 beta1=0 decay=0 cutoff=1000000000",  # 2^40: Adam is SGD then
    "decoupled": "decoupled lr=1 momentum=0 mean=plain",
    "a2cid2": "a2cid2 chi1=1 chi2=1",
    "ad_psgd": "ad_psgd",
    "a_edit": "a_edit lr=1 momentum=0 relative_temperature=inf clip=inf",
    "co2": "co2 lr=1 momentum=0 bound=inf",
    "delayed": "delayed lr=1 momentum=0 late=0",
    "delayed_nesterov": "delayed_nesterov lr=1 momentum=0 delay=1",
    "demo_sgd": "demo_sgd lr=1 step=mean",
    "des_loc": "des_loc",
    "diloco": "diloco lr=1 momentum=0",
    "eager": "eager lr=1 momentum=0",
    "edit": "edit lr=1 momentum=0 relative_temperature=inf clip=inf",
    "masha": "masha parts=1",
    "mt_dao": "mt_dao",
    "muloco": "muloco lr=1 momentum=0",
    "fedbuff": "fedbuff lr=1 discount=0",
    "heloco": "heloco lr=1 momentum=0 turn=0 shrink=0 discount=0",
    "gasloc": "gasloc lr=1 momentum=0 pull=1",
    "late_merge": "late_merge first=1",
    "fedopt": "fedopt lr=2 beta1=0 beta2=1 tau=1",
    "local_sgd": "local_sgd",
    "noloco": "noloco alpha=0 beta=1 gamma=1",
    "pier": "pier lr=1 momentum=0 floor=0",
    "slowmo": "slowmo lr=1 momentum=0",
    "partial_updates": "partial_updates lr=1 momentum=0 slices=1",
    "scaffold": "scaffold",
    "sparseloco": "sparseloco",
    "sparta": "sparta parts=1 whole=0",
    "spes": "spes merge_rate=0",
    "streaming": "streaming lr=1 momentum=0",
    "variance_corrected": "variance_corrected strength=0",
}
# Changes are sums of random directions: no rate makes them the mean of what contributors trained to, and a walk along
# them of a peer that is away, at a rate that is meant for gradients, grows until its absence counts for nothing.
ALONG_DIRECTIONS = ("just_one_byte",)
METHODS = tuple(
    dict.fromkeys(
        [
            *PRESETS,
            *NEUTRAL.values(),
            "cgad decay=0.5 cutoff=2",
            "decoupled momentum=0",
            "co2 penalty=2 bound=0.001",
            "delayed_nesterov delay=3 spread=0.25",
            "des_loc first_moment=1 second_moment=1",
            "diloco restart=2",
            "edit warmup=2",
            "masha choose=random parts=3",
            "mt_dao slow=2 variance=3",
            "muloco lr=0.5",
            "muloco momentum=0.9",
            "fedbuff lr=0.5 discount=2",
            "heloco keep=1 most=0.5 trust=0",
            "gasloc momentum=0.9 pull=0.3",
            "just_one_byte lr=0.3",
            "late_merge first=0 growth=3",
            "fedopt variant=adagrad",
            "fedopt variant=yogi",
            "local_sgd lr=0.5",
            "noloco alpha=0 beta=1 gamma=0",
            "pier rise=0 decay_from=1 decay_over=2",
            "partial_updates lr=1 momentum=0 slices=5",
            "sparseloco lr=0.3",
            "sparta parts=3 whole=0",
            "sparta parts=3 whole=2",
            "streaming alpha=0",
        ]
    )
)


def method_of(spelling: str) -> OuterMethod:
    """The outer method of ``name key=value ...``."""
    return make_outer(*words_of(spelling))


AGGREGATIONS = tuple(
    dict.fromkeys(
        [
            *aggregation_names(),
            "arc f=2",
            "arc f=2 then=mean",
            "arc f=2 then=nnm",
            "bucketing size=1",
            "bucketing f=1 size=2 then=mda",
            "caf f=2",
            "centered_clip start=zero",
            "flag rank=2",
            "krum f=2",
            "mda f=2",
            "meamed f=2",
            "multi_krum f=2",
            "multi_krum f=2 m=2",
            "nnm f=2",
            "nnm f=2 then=krum",
            "rfa start=zero",
            "trimmed_mean f=2",
        ]
    )
)
# Laws that a rule cannot keep, by its name, and why.
TRUSTS = ("mean",)  # one contributor moves it anywhere
BY_LENGTH = ("norm_clip", "arc", "flag")  # shorter is not nearer: it follows where zero is
BY_PLACE = ("mda", "bucketing")  # subsets that share their widest pair: the first by peer id wins; lots go by place


def rule_of(spelling: str) -> Aggregation:
    """The aggregation rule of ``name key=value ...``."""
    return make_aggregation(*words_of(spelling))


def words_of(spelling: str) -> tuple[str, dict[str, Any]]:  # Any: as _value
    """The name and the keys of ``name key=value ...``."""
    name, *keys = spelling.split()
    return name, {key: _value(text) for key, _, text in (word.partition("=") for word in keys)}


def topology_of(spelling: str) -> str:
    return method_of(spelling).topology


def last_of(spelling: str) -> str:
    """The name of the compressor, or of the quantiser of a chain."""
    return spelling.split(" >> ")[-1].split("(")[0]


def follows(spelling: str) -> bool:
    return last_of(spelling) in FOLLOWS


def is_lopsided(spelling: str) -> bool:
    return last_of(spelling) in LOPSIDED


def _value(text: str) -> Any:  # Any: a word, or a whole number, where the method wants one
    if text.isdigit():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


COMPRESSORS = [
    "none",
    "fp16",
    "bf16",
    "int8(block=4096)",
    "int8(block=7)",
    "int4(block=256)",
    "int4(block=5)",
    "nf4(block=64)",
    "nf4(block=7)",
    "fp8(block=256)",
    "fp8(block=3)",
    "sign(block=1024)",
    "sign(block=9)",
    "codebook8",
    "sparseloco2",
    "qsgd(levels=7, block=256, seed=0)",
    "qsgd(levels=127, block=5, seed=3)",
    "natural(seed=0)",
    "e3m0(block=256)",
    "e3m0(block=5)",
    "signmag2",
    "topk(k=64, chunk=4096)",
    "topk(k=1, chunk=16)",
    "topk(k=256, chunk=256)",
    "topk(k=64, chunk=4096) >> signmag2",
    "topk(k=64, chunk=4096) >> int8(block=64)",
    "topk(k=3, chunk=64) >> e3m0(block=6)",
    "topk(k=64, chunk=4096) >> fp16",
    "topk(k=64, chunk=4096) >> qsgd(levels=7, block=64, seed=0)",
    "topk(k=64, chunk=4096) >> sparseloco2",
    "topk(k=64, chunk=4096) >> codebook8",
    "threshold(k=64, sample=0.01)",
    "threshold(k=640, sample=1.0) >> signmag2",
    "threshold(k=64, sample=0.01) >> int8(block=64)",
    "lowrank(rank=4, iterations=4)",
    "lowrank(rank=17, iterations=1)",
    "dct(k=64, chunk=4096)",
    "dct(k=5, chunk=49) >> int8(block=64)",
    "dct(k=64, chunk=4096) >> signmag2",
    "randk(k=64, chunk=4096, seed=0)",
    "randk(k=7, chunk=50, seed=3) >> int8(block=64)",
    "randk(k=64, chunk=4096, seed=0) >> signmag2",
]
# Laws that a method cannot keep, by its name, and why.
NOT_LINEAR = ("variance_corrected",)  # who met whom shows in the mean of all replicas
FOLLOWS = ("int8", "codebook8", "sparseloco2", "qsgd")  # levels follow what is sent, so what arrived has others
LOPSIDED = ("nf4", "sparseloco2")  # published with more levels on one side of zero than on the other
FINE = ("fp8", "nf4", "codebook8", "sparseloco2")  # levels have so many bits that a debt is rounded to float32
