"""The terms of a run, ``run.toml``: read, check, write, compare. All peers hold the same; its digest is the run id."""

from decentral.manifest.files import differences, differing, load_manifest, parse_manifest, summary
from decentral.manifest.presets import check_methods, fresh_salt, preset_manifest, rule_of
from decentral.manifest.terms import Manifest, Redundancy

__all__ = [
    "Manifest",
    "Redundancy",
    "check_methods",
    "differences",
    "differing",
    "fresh_salt",
    "load_manifest",
    "parse_manifest",
    "preset_manifest",
    "rule_of",
    "summary",
]
