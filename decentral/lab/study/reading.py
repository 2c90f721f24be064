"""From a file to a checked study: every manifest that it may need is made once, before anything is run."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import torch

from decentral.errors import ConfigError, UsageError
from decentral.lab.study.settings import Place, Settings, combinations, grid_of
from decentral.lab.study.terms import Control, Study
from decentral.manifest import Manifest
from decentral.manifest.table import checked, one_line
from decentral.optimizers import make_outer

__all__ = ["check_device", "check_installed", "load_study", "parse_study"]


def load_study(path: Path) -> Study:
    """The study in a file. Raises ConfigError with one line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror or error}); docs/lab.md says how to write one"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); a study is a TOML file") from error
    return parse_study(text, str(path))


def parse_study(text: str, source: str = "study") -> Study:
    """The study of a text, with all its methods and settings checked. Raises ConfigError."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not TOML: {one_line(error)}; correct that place") from None
    study = checked(Study, tables, source)
    try:
        _check_settings(study)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return study


def _check_settings(study: Study) -> None:
    settings = Settings(study)
    for point in grid_of(study):
        settings.peers(point)
        for entry in study.entries:
            for own in [(), *combinations(entry.search)]:
                settings.manifest(Place(entry.name, point, study.study.learning_rates[0], own), 0)
        for control in study.control:
            if control.flips == "momentum":
                _check_has_a_state(control, settings.manifest(Place(control.of, point, 1.0), 0))


def _check_has_a_state(control: Control, terms: Manifest) -> None:
    """ConfigError where what the state adds to a step is nothing, with either sign."""
    if not make_outer(terms.outer.method, terms.outer.hyper).init(torch.zeros(1)):
        raise ConfigError(
            f'{control.name}: flips = "momentum" does not fit {terms.outer.method}, which has no state; use "update"'
        )


def check_installed(study: Study) -> None:
    """ConfigError unless what a study needs beside the package is there: before the first run, not after the last."""
    wanted = {"scipy": "scipy", "matplotlib": "matplotlib"}
    wanted |= {"sklearn": "scikit-learn"} if study.study.task == "digits" else {}
    for module, name in wanted.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"a study needs {name}; pip install 'decentral[lab]', which has it")


def check_device(study: Study, device: str) -> None:
    """UsageError unless models of this study can train on ``device``, as torch spells it."""
    if study.study.task == "digits" and device != "cpu":
        raise UsageError(f"--device {device}: digits are so small that they train on the processor; leave it out")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # the last two: torch was built without that kind
        why = one_line(error)
        raise UsageError(f"--device {device}: this machine has none that torch can use ({why}); leave it out") from None
