"""The terms of a run, ``run.toml``: read, check, write, compare. All peers hold the same; its digest is the run id."""

from decentral.manifest.aggregation import rule_of
from decentral.manifest.presets import check_methods, fresh_salt, preset_manifest
from decentral.manifest.reading import load_manifest, parse_manifest
from decentral.manifest.redundancy import Redundancy
from decentral.manifest.terms import Manifest
from decentral.manifest.writing import differences, differing, summary

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
