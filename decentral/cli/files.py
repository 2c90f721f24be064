"""Directories and small files that commands make, with errors a person can act on."""

from contextlib import suppress
from pathlib import Path

from decentral.errors import DiskError


def make_directory(path: Path) -> Path:
    """Make a directory with its parents. Raises DiskError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"{path}: cannot be made ({error.strerror}); choose another place") from error
    return path


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step, so that nobody reads half of it. Raises DiskError."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise DiskError(f"{path}: cannot be written ({error.strerror}); choose another place") from error
