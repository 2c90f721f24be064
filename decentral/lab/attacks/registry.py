"""Attacks by name. Other packages add theirs through the entry point group "decentral.attacks"."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

from decentral import plugins
from decentral.errors import ConfigError
from decentral.lab.attacks.alie import ALIE
from decentral.lab.attacks.attack import Attack
from decentral.lab.attacks.copycat import Copycat
from decentral.lab.attacks.ipm import IPM
from decentral.lab.attacks.label_flip import LabelFlip
from decentral.lab.attacks.mimic import Mimic
from decentral.lab.attacks.noise import GaussianNoise
from decentral.lab.attacks.optimised import OptimisedALIE, OptimisedIPM
from decentral.lab.attacks.scale import Scale
from decentral.lab.attacks.sign_flip import SignFlip
from decentral.lab.attacks.withheld import Withheld
from decentral.plugins import Plugins

__all__ = ["attack_names", "describe_attacks", "make_attack"]

_OURS = (
    ALIE, Copycat, GaussianNoise, IPM, LabelFlip, Mimic, OptimisedALIE, OptimisedIPM, Scale, SignFlip, Withheld,
)  # fmt: skip
_ATTACKS = Plugins("attack", "decentral.attacks", MappingProxyType({one.name: one for one in _OURS}))


def attack_names() -> list[str]:
    """The names of our attacks, sorted."""
    return sorted(_ATTACKS.ours)


def make_attack(word: str) -> Attack:
    """The attack of a spelling, ``sign_flip`` or ``scale(factor=100)``; ConfigError, with the nearest, for none."""
    made = plugins.make(word, _ATTACKS, "sign_flip or scale(factor=100)")
    if not isinstance(made, Attack):
        raise ConfigError(f"attack {word}: it is no attacks.Attack; ask its author")
    return made


def describe_attacks() -> list[dict[str, object]]:
    """One row per attack: name, keys with their defaults, equation, source."""
    return [_described(name, make_attack(name)) for name in _ATTACKS.names()]


def _described(name: str, attack: Attack) -> dict[str, object]:
    keys = dataclasses.asdict(attack)  # type: ignore[call-overload]  # a dataclass: see Plugins
    return {"name": name, "keys": keys, "equation": attack.equation, "source": attack.source}
