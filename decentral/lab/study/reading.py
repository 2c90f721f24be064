"""From a file to a checked study: every manifest that it may need is made once, before anything is run."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

from decentral.errors import ConfigError
from decentral.lab.study.settings import Place, Settings, combinations, grid_of
from decentral.lab.study.terms import Study
from decentral.manifest.checking import checked, one_line

__all__ = ["check_installed", "load_study", "parse_study"]


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


def check_installed(study: Study) -> None:
    """ConfigError unless what a study needs beside the package is there: before the first run, not after the last."""
    wanted = {"scipy": "scipy"} | ({"sklearn": "scikit-learn"} if study.study.task == "digits" else {})
    for module, name in wanted.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"a study needs {name}; pip install 'decentral[lab]', which has it")
