"""The scenario of a seed: in every eighth, terms that no preset names, as far as a manifest accepts them.

Methods come in turn, all of them; everything else of a run's terms is left to chance: the method's keys, what
compresses and what is owed, what carries it, the rule by which contributions become one vector, what they weigh,
fragments, overlap and pace. Whatever a manifest accepts has to keep every guarantee.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from decentral.errors import ConfigError
from decentral.manifest import Manifest, check_methods, preset_manifest
from decentral.simulate.scenario import SHORTER, Scenario, drawn
from tests.kit.tables import AGGREGATIONS, COMPRESSORS, METHODS, PRESETS, words_of

EVERY, TURN = 8, 6  # seeds of which one is drawn here, and which: none that has a method in its turn
FEEDBACK = ("none", "ef(beta=0.95)", "ef(beta=1.0)", "dgc(momentum=0.5)", "ef21", "econtrol(eta=0.01)")
PACES: tuple[Mapping[str, Any], ...] = ({"pace": "speed"}, {"pace": "clock", "seconds": 1.0})
Tables = Mapping[str, Mapping[str, Any]]  # Any: values of every key of a manifest


def scenario(seed: int, rounds: int, *, committees: bool = False) -> Scenario:
    """What a seed stands for; with ``committees`` more hosts of which a few vote, as 21 do of larger swarms."""
    usual = drawn(seed, rounds)
    if committees:
        generator = random.Random(f"committee {seed}")
        seats = generator.choice([3, 3, 3, 5])
        usual = replace(usual, seats=seats, hosts=seats + generator.choice([1, 1, 2, 3]))
    return replace(usual, manifest=widely(seed, usual.manifest), lesson="noise") if seed % EVERY == TURN else usual


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
