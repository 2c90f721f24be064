"""What hostile peers send: attacks by name, for the laboratory and for tests of aggregation rules."""

from decentral.lab.attacks.attack import Attack, Rule
from decentral.lab.attacks.registry import attack_names, describe_attacks, make_attack

__all__ = ["Attack", "Rule", "attack_names", "describe_attacks", "make_attack"]
