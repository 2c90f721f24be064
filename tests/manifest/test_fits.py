"""What a manifest may ask of its method, compressor, feedback, exchange and rule together: what would lose progress
without a word, or compare what cannot be compared, is refused with what fits.
"""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import pytest

from decentral.errors import ConfigError
from decentral.manifest import check_methods, preset_manifest
from decentral.optimizers import CHANGE, aggregation_names

Tables = dict[str, dict[str, Any]]

SPARSE = "topk(k=64, chunk=4096) >> signmag2"
EF = "ef(beta=0.95)"
DENSE = {"compressor": {"chain": "int8(block=4096)", "feedback": "none"}}
NO_CLIP = {"outer": {"norm_clip": None}}


def chain(spelled: str, feedback: str = EF) -> Tables:
    return {"compressor": {"chain": spelled, "feedback": feedback}}


def kind(name: str) -> Tables:
    return {"exchange": {"kind": name}}


def rule(name: str, clip: str | None = None, **keys: Any) -> Tables:
    return {"outer": {"norm_clip": clip, "aggregation": {"rule": name, **keys}}}


OF_OTHERS = [name for name in aggregation_names() if name not in ("mean", "norm_clip")]  # they compare peers
PARTS = list(product(("partial_updates", "spes"), ("gather", "reduce")))
FIT: dict[str, list[tuple[str, Tables]]] = {
    "a pair takes what keeps the slow weights": [
        ("noloco", chain(spelled, feedback))
        for spelled in ("none", "fp16", "bf16", "int8", "fp8", "codebook8", "qsgd(levels=127, block=64)")
        for feedback in ("none", EF, "dgc(momentum=0.9)")
    ],
    "a reduce takes what works on flat values": [
        ("diloco", NO_CLIP | chain(spelled)) for spelled in (SPARSE, "sign", "dct(k=64, chunk=4096)", "int4", "randk")
    ],
    "a method whose states have a compressor of their own takes any for the change": [
        (method, kind(exchange) | chain(spelled))
        for method in ("des_loc", "mt_dao")
        for exchange in ("gather", "reduce")
        for spelled in (SPARSE, "int8", "int4")
    ],
    "mechanisms of the sender alone fit a swarm, and others a gather": [
        ("sparseloco", {"compressor": {"feedback": feedback}})
        for feedback in ("none", "ef(beta=0.5)", "dgc(momentum=0.9)", "ef21", "econtrol(eta=0.001)")
    ],
    "a reduce takes what looks at norms": [
        ("diloco", rule("mean")),
        ("diloco", rule("norm_clip")),
        ("diloco", rule("arc", then="mean")),
    ],
    "where peers train different parts a mean is left": [
        (method, kind(exchange) | DENSE | rule(name)) for method, exchange in PARTS for name in ("mean", "norm_clip")
    ],
    "what is refused elsewhere fits here": [
        ("noloco", {"outer": {"weighting": "equal"}}),
        ("noloco", {"outer": {"norm_clip": "none"}}),
        ("noloco", rule("mean", clip="none")),
        ("streaming", {"outer": {"norm_clip": "median"}}),
        ("diloco", kind("gather") | chain("lowrank")),
        ("diloco", kind("reduce") | {"outer": {"norm_clip": "median"}}),
        ("gasloc", chain("int8", "none")),
        ("des_loc", {"outer": {"moments": "int8"}}),
        ("mt_dao", {"outer": {"moments": "int8"}}),
        ("sparseloco", rule("median") | chain("int4", "none")),
        *(("diloco", kind("gather") | DENSE | rule(name)) for name in ("krum", "rfa", "nnm", "median", "arc")),
    ],
}
LOSSY = {SPARSE: "94%", "randk": "99%", "sign": "60%", "lowrank": "99%", "e3m0": "19%", "int4": "13%"}
REFUSED: list[tuple[str, Tables, str]] = [
    *(
        ("noloco", chain(spelled), rf'does not fit outer.method noloco: it would lose {lost}.*use one.*"fp16"')
        for spelled, lost in LOSSY.items()
    ),
    ("noloco", {"outer": {"weighting": "tokens"}}, r'outer.weighting = "tokens" does not fit.*or use "equal"'),
    ("noloco", {"outer": {"overlap": 1}}, r'outer.overlap = 1 does not fit exchange.kind = "pair".*set it to 0'),
    ("noloco", {"outer": {"norm_clip": "median"}}, r'norm_clip = "median": of two contributions nobody can tell'),
    ("noloco", rule("rfa", clip="none"), 'rule = "rfa": of two contributions nobody can tell'),
    ("diloco", NO_CLIP | chain("lowrank"), r'"lowrank\(.*" does not fit exchange.kind = "reduce".*kind = "gather"'),
    (
        "sparseloco",
        kind("reduce") | {"outer": {"norm_clip": "median"}},
        r"norm_clip = .median. does not fit compressor.feedback in a reduce",
    ),
    *(
        ("gasloc", chain("int8", feedback), r'does not fit outer.method gasloc: it sends parameters.*use "none"')
        for feedback in (EF, "dgc(momentum=0.9)")
    ),
    ("gasloc", chain("topk(k=64, chunk=4096)", "none"), r"does not fit outer.method gasloc: it would lose 9\d%"),
    ("gasloc", chain("sign", "none"), "does not fit outer.method gasloc: it would lose 60%"),
    ("scaffold", chain("sign"), r"does not fit outer.method scaffold: it would lose"),
    *(
        (
            method,
            {"outer": {"moments": "int4"}},
            rf'compressor "int4" of exp_avg and exp_avg_sq does not fit.*{method}.*13%',
        )
        for method in ("des_loc", "mt_dao")
    ),
    *((method, {"outer": {"moments": "bf15"}}, "bf15") for method in ("des_loc", "mt_dao")),
    *(
        (
            preset,
            kind(exchange) | {"compressor": {"feedback": feedback}},
            rf"does not fit exchange.kind = .{exchange}.*{why}.*use .gather.",
        )
        for feedback in ("ef21", "econtrol(eta=0.001)")
        for preset, exchange, why in (
            ("diloco", "reduce", "slices of ranges that move"),
            ("noloco", "pair", "partners change from step to step"),
        )
    ),
    ("sparseloco", {"compressor": {"feedback": "ef22"}}, "did you mean ef21"),
    *(
        ("diloco", DENSE | rule(name), rf'rule = "{name}" does not fit exchange.kind = "reduce".*"gather"')
        for name in ("krum", "rfa", "nnm", "median", "arc")
    ),
    *(
        ("sparseloco", rule(name) | {"compressor": {"chain": spelled}}, "most of what a peer sends is zeros")
        for name in ("median", "trimmed_mean", "meamed")
        for spelled in (SPARSE, "randk", "threshold(k=64)")
    ),
    # Krum would choose one slice's owner in each round, and no other slice would be trained.
    *(
        (
            method,
            kind(exchange) | DENSE | rule(name),
            rf'rule = "{name}" does not fit outer.method {method}: .*different parts',
        )
        for (method, exchange), name in product(PARTS, OF_OTHERS)
    ),
    ("sparseloco", rule("krumm"), r"aggregation rule krumm is not known here; .*did you mean krum\?"),
    ("sparseloco", rule("krum", ff=1), r"unknown key outer\.aggregation\.ff; did you mean f\?"),
    ("sparseloco", rule("median", f=1), r"unknown key outer\.aggregation\.f; median has none of its own"),
    ("sparseloco", rule("krum", f=0), "0 is the rule mean"),
    ("sparseloco", rule("nnm", then="median"), "goes by coordinates"),
    ("sparseloco", rule("krum", "median"), r'"median" is the older spelling of a rule, .*leave out outer\.norm_clip'),
]


@pytest.mark.parametrize("why", FIT)
def test_what_fits_together_is_taken(why: str) -> None:
    for preset, tables in FIT[why]:
        check_methods(preset_manifest(preset, **tables))


def test_what_does_not_fit_is_refused_with_what_does() -> None:
    wrong = []
    for preset, tables, says in REFUSED:
        try:
            with pytest.raises(ConfigError, match=says):
                check_methods(preset_manifest(preset, **tables))
        except (pytest.fail.Exception, AssertionError) as error:
            wrong.append((preset, tables, str(error)))
    assert wrong == []


def test_a_method_that_takes_each_contribution_has_a_rule_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    each = (dataclasses.replace(CHANGE, combine="each"),)
    monkeypatch.setattr("decentral.optimizers.sparseloco.SparseLoCo.channels", lambda self: each)
    with pytest.raises(ConfigError, match=r"outer\.method sparseloco, which takes every contribution as it is"):
        check_methods(preset_manifest("sparseloco", run={"salt": "one"}, **rule("krum")))
    check_methods(preset_manifest("sparseloco"))
