"""The tables of all methods and of all compressors: a new one of ours is in every law, and with every preset's tests.

A method needs no line here, it is found by its name; one line more gets every law for other hyper-parameters, too.
"""

from __future__ import annotations

from typing import Any

from decentral.optimizers import OuterMethod, make_outer, presets

PRESETS = tuple(presets())
GOSSIPS = tuple(name for name in PRESETS if make_outer(name, {}).topology == "pair")
SYNCHRONOUS = tuple(name for name in PRESETS if name not in GOSSIPS)

# By method the spelling without momentum at rate 1: its anchor is the mean of what contributors trained to.
NEUTRAL = {
    "delayed_nesterov": "delayed_nesterov lr=1 momentum=0 delay=1",
    "des_loc": "des_loc",
    "diloco": "diloco lr=1 momentum=0",
    "edit": "edit lr=1 momentum=0 temperature=inf clip=inf",
    "noloco": "noloco alpha=0 beta=1 gamma=1",
    "partial_updates": "partial_updates lr=1 momentum=0 slices=1",
    "scaffold": "scaffold",
    "sparseloco": "sparseloco",
    "spes": "spes merge_rate=0",
    "streaming": "streaming lr=1 momentum=0",
}
METHODS = tuple(
    dict.fromkeys(
        [
            *PRESETS,
            *NEUTRAL.values(),
            "delayed_nesterov delay=3 spread=0.25",
            "des_loc first_moment=1 second_moment=1",
            "edit warmup=2",
            "noloco alpha=0 beta=1 gamma=0",
            "partial_updates lr=1 momentum=0 slices=5",
            "sparseloco lr=0.3",
            "streaming alpha=0",
        ]
    )
)


def method_of(spelling: str) -> OuterMethod:
    """The outer method of ``name key=number ...``."""
    name, *hyper = spelling.split()
    return make_outer(name, {key: _number(text) for key, _, text in (word.partition("=") for word in hyper)})


def topology_of(spelling: str) -> str:
    return method_of(spelling).topology


def last_of(spelling: str) -> str:
    """The name of the compressor, or of the quantiser of a chain."""
    return spelling.split(" >> ")[-1].split("(")[0]


def follows(spelling: str) -> bool:
    return last_of(spelling) in FOLLOWS


def is_lopsided(spelling: str) -> bool:
    return last_of(spelling) in LOPSIDED


def _number(text: str) -> Any:  # Any: a whole number where the method wants one
    return int(text) if text.isdigit() else float(text)


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
FOLLOWS = ("int8", "codebook8", "sparseloco2", "qsgd")  # levels follow what is sent, so what arrived has others
LOPSIDED = ("nf4", "sparseloco2")  # published with more levels on one side of zero than on the other
FINE = ("fp8", "nf4", "codebook8", "sparseloco2")  # levels have so many bits that a debt is rounded to float32
