"""The scenario of a seed: an algorithm, a size, weather and terms, all drawn; a few inner steps, deadlines of seconds.

In every eighth, terms that no preset names, as far as a manifest accepts them: methods come in turn, all of them, and
everything else of a run's terms is left to chance: the method's keys, what compresses and what is owed, what carries
it, the rule by which contributions become one vector, what they weigh, fragments, overlap and pace. Whatever a
manifest accepts has to keep every guarantee.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from decentral.errors import ConfigError
from decentral.manifest import Manifest, check_methods, preset_manifest
from decentral.optimizers import make_outer, presets
from decentral.simulate.lessons import LessonName
from decentral.simulate.scenario import PROFILES, Scenario
from tests.kit.tables import AGGREGATIONS, COMPRESSORS, METHODS, PRESETS, words_of

Tables = Mapping[str, Mapping[str, Any]]  # Any: values of every key of a manifest
_EXACT = {"chain": "topk(k=128, chunk=4096)", "feedback": "ef(beta=1)"}  # 3 of 96: most of it is debt for a while
_UNCLIPPED = {"norm_clip": None}  # what is given is counted to the last bit, and a clip takes some of it
_PLAIN = {"chain": "none", "feedback": "none"}
_GOSSIPS = sorted(name for name, preset in presets().items() if preset.exchange == "pair")
_KINDS: dict[str, tuple[str, Tables]] = {  # preset, and what is changed of it
    "gather": ("sparseloco", {"outer": _UNCLIPPED, "compressor": _EXACT}),
    "reduce": ("diloco", {"outer": {"learning_rate": 1.0, "momentum": 0.0, **_UNCLIPPED}, "compressor": _PLAIN}),
    "streaming": ("streaming", {"inner": {"steps": 6}, "outer": {"fragments": 3, "overlap": 1}}),
    "pair": (_GOSSIPS[0], {}),  # and the others in turn, see toy_manifest
    "float": ("sparseloco", {}),  # gather, with values that an order of sums shows in
}
KINDS = tuple(_KINDS)
OTHERS_EVERY = 4  # seeds of which one has a method of ``others``
SHORTER: dict[str, dict[str, float]] = {  # so that what takes a run a day comes to pass in 20 rounds
    **{name: {"grace": 0.5} for name in ("cgad", "decoupled", "delayed_nesterov", "fedbuff")},
    "edit": {"warmup": 12},
    "late_merge": {"first": 0.3, "growth": 12},
    "a_edit": {"warmup": 12, "seconds": 3.0},
    "heloco": {"grace": 0.5, "keep": 0.45},  # a cosine that marks do not have: at 0.5 rounding would decide
}
CLAIMS = (0.0, 300.0, 3_000.0, 30_000.0)  # with frames of a few kB: who sends by way of others, and who owns how much
LIMITS = {"deadline_floor": 1.0, "deadline_ceiling": 8.0, "min_peers": 1}
EVERY, TURN = 8, 6  # seeds of which one is drawn here, and which: none that has a method in its turn
FEEDBACK = ("none", "ef(beta=0.95)", "ef(beta=1.0)", "dgc(momentum=0.5)", "ef21", "econtrol(eta=0.01)")
PACES: tuple[Mapping[str, Any], ...] = ({"pace": "speed"}, {"pace": "clock", "seconds": 1.0})


def scenario(seed: int, rounds: int, *, kind: str = "") -> Scenario:
    """What a seed stands for; of ``committees`` more hosts of which a few vote, as 21 do of larger swarms, of ``parts``
    hosts of which some train a part of the model.
    """
    if kind == "parts":
        return of_parts(seed, rounds)
    if kind == "groups":
        return of_groups(seed, rounds)
    if kind == "many-groups":
        return of_many_groups(seed, rounds)
    usual = drawn(seed, rounds)
    if kind == "committees":
        generator = random.Random(f"committee {seed}")
        seats = generator.choice([3, 3, 3, 5])
        usual = replace(usual, seats=seats, hosts=seats + generator.choice([1, 1, 2, 3]))
    return replace(usual, manifest=widely(seed, usual.manifest), lesson="noise") if seed % EVERY == TURN else usual


def of_parts(seed: int, rounds: int) -> Scenario:
    """A swarm in three fragments, some of whose hosts, or all of them, train one each."""
    usual, generator = drawn(seed, rounds), random.Random(f"parts {seed}")
    exchange = generator.choice(["gather", "gather", "reduce"])
    manifest = toy_manifest(exchange, seed).changed(
        inner={"steps": 6},
        outer={"fragments": 3, "layout": "stages", "overlap": generator.choice([0, 0, 1])},
        swarm=usual.manifest.swarm.model_dump(),
    )
    hosts = generator.choice([3, 4, 4, 5])
    parts = generator.choice([1, 1, 2, hosts - 1, hosts])
    return replace(usual, manifest=manifest, hosts=hosts, parts=parts, lesson="marks")


def of_groups(seed: int, rounds: int) -> Scenario:
    """A swarm in four fragments, some of whose hosts share replicas, and one or two of which train all of it."""
    usual, generator = drawn(seed, rounds), random.Random(f"groups {seed}")
    exchange = generator.choice(["gather", "gather", "reduce"])
    manifest = toy_manifest(exchange, seed).changed(
        inner={"steps": 8},
        outer={
            "fragments": 4,
            "layout": "stages",
            "overlap": generator.choice([0, 0, 1]),
            "skip": random.Random(f"skip {seed}").choice([None, 0.5]),
        },
        swarm=usual.manifest.swarm.model_dump(),
    )
    stages = generator.choice([2, 2, 3, 4])
    groups = generator.choice([1, 2]) if stages == 2 else 1
    spares = generator.choice([0, 0, 1])
    hosts = generator.choice([1, 2]) + stages * groups + spares
    shared = {"groups": groups, "stages": stages, "spares": spares}
    return replace(usual, manifest=manifest, hosts=hosts, lesson="marks", **shared)


def of_many_groups(seed: int, rounds: int, groups: int = 64) -> Scenario:
    """Sixty-four replicas of four hosts each, in the weather of homes, beside four hosts that train all of the model.

    They come one after the other and form their groups in calm. A round is long enough for most machines to be there:
    of rounds of 2 s, a crash in fourteen and an absence of 20 s, half of them were away at any time, and no round came.
    And the network splits as often as one of four hosts.
    """
    manifest = toy_manifest("gather", seed, {"deadline_ceiling": 15.0, "min_peers": 1, "lease": 20.0}).changed(
        inner={"steps": 8}, outer={"fragments": 4, "layout": "stages"}
    )
    hosts, home = 4 * groups + 4, PROFILES["home"]
    return Scenario(
        manifest,
        replace(home, partitions=4 * home.partitions / hosts),
        seed,
        hosts,
        rounds,
        step_seconds=1.0,
        arrivals=0.1 * hosts,
        calm_start=True,
        formed=0.95,
        groups=groups,
        stages=4,
        patience=60.0,
        settle=600.0,
    )


def widely(seed: int, around: Manifest) -> Manifest:
    """Some terms of a method, in a run and a swarm as those of ``around``. Of each part what a manifest accepts."""
    generator, preset = random.Random(f"terms {seed}"), PRESETS[seed // EVERY % len(PRESETS)]
    kept = {"run": around.run.model_dump(), "swarm": around.swarm.model_dump()}
    manifest = preset_manifest(preset, **kept, inner={"steps": 6}, outer=SHORTER.get(preset, {}))
    for tables in _parts(preset, generator):
        with suppress(ConfigError):
            other = manifest.changed(**tables)
            check_methods(other)
            manifest = other
    return manifest


def _parts(preset: str, generator: random.Random) -> Iterator[Tables]:
    """What may be other than the preset says, each with a chance of its own."""
    exchange, rule = generator.choice(["gather", "reduce"]), words_of(generator.choice(AGGREGATIONS))
    outer = [
        {"fragments": generator.choice([2, 3])},
        {"overlap": generator.choice([0, 1, 2])},
        {"weighting": generator.choice(["equal", "tokens"])},
        {"norm_clip": None, "aggregation": {"rule": rule[0], **rule[1]}},
        _keys(generator.choice([one for one in METHODS if one.split()[0] == preset])),
    ]
    inner = [{"inner": generator.choice(PACES)}]
    packed = [
        {"compressor": {"chain": generator.choice(COMPRESSORS)}},
        {"compressor": {"feedback": generator.choice(FEEDBACK)}},
    ]
    for part in [{"exchange": {"kind": exchange}}, *packed, *inner, *({"outer": keys} for keys in outer)]:
        if generator.random() < 0.6:
            yield part


def _keys(spelling: str) -> Mapping[str, Any]:
    """The method's own, as a manifest spells them."""
    return {"learning_rate" if key == "lr" else key: value for key, value in words_of(spelling)[1].items()}


# ---- usual terms ----


def drawn(seed: int, rounds: int = 20) -> Scenario:
    """Algorithm, size and weather are all drawn; terms are those of presets."""
    generator = random.Random(seed)
    kind = generator.choice(["gather", "gather", "reduce", "streaming", "float", "gather", "reduce", "pair"])
    if seed % OTHERS_EVERY == 0:
        kind = others()[seed // OTHERS_EVERY % len(others())]
    profile = generator.choice([PROFILES["home"], PROFILES["storm"], PROFILES["storm"], PROFILES["spot"]])
    hosts = generator.choice([2, 2, 3, 3, 3, 3, 3, 3, 4, 5])
    split = generator.choice([1.0, 4.0, 4.0, 15.0])
    weather = replace(
        profile,
        crashes=profile.crashes * generator.choice([0.04, 0.1, 0.1, 0.2, 0.2, 0.4, 1.0]),
        sleeps=profile.sleeps * generator.choice([0.1, 0.1, 0.3, 1.0]),
        delay=profile.delay * generator.choice([0.1, 0.1, 0.5, 2.0]),
        away=generator.choice([1.0, 3.0, 8.0]),
        partition_for=split,
        partitions=profile.partitions * min(1.0, 2.0 / split),  # else the network would be split most of the time
    )
    patience = {"shrink_after": generator.choice([15.0, 90.0]), "lease": generator.choice([3.0, 12.0, 12.0, 12.0])}
    manifest = toy_manifest(kind, seed, {**LIMITS, **patience})
    lesson: LessonName = "marks" if _leaves_marks(kind) else "noise"
    calm_start = generator.random() < 0.8
    return Scenario(manifest, weather, seed, hosts, rounds, calm_start=calm_start, lesson=lesson, claims=CLAIMS)


def toy_manifest(kind: str, seed: int, limits: Mapping[str, float] = LIMITS) -> Manifest:
    """The terms of a run of one of ``KINDS`` or ``others``: a few inner steps per round, deadlines of seconds."""
    run = {"rounds": 1_000_000, "salt": f"s{seed}", "seed": seed}
    preset, tables = _KINDS.get(kind) or (kind, _of_other(kind))
    if kind == "pair":
        preset = _GOSSIPS[seed // 11 % len(_GOSSIPS)]  # so that few seeds have all
        tables = {"outer": SHORTER.get(preset, {})}
    return preset_manifest(preset, run=run, swarm=limits, **{"inner": {"steps": 4}, **tables})


def _of_other(kind: str) -> Tables:
    outer = SHORTER.get(kind, {})
    return {"outer": {**outer, **_UNCLIPPED}, "compressor": _EXACT} if _leaves_marks(kind) else {"outer": outer}


def others() -> tuple[str, ...]:
    """Our methods in which all peers agree, beside those of ``KINDS``."""
    known = {preset for preset, _ in _KINDS.values()}
    return tuple(sorted(name for name, preset in presets().items() if preset.exchange != "pair" and name not in known))


def _leaves_marks(kind: str) -> bool:
    """Return whether what is given is counted to the last bit."""
    if kind not in others():
        return kind in ("gather", "reduce")
    return presets()[kind].exchange == "gather" and not make_outer(kind, {}).summary.rebuilds
