"""A look at what a person typed, before anything is made, bound or asked of the network; what a refused start made all
the same is taken back.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from decentral.errors import ConfigError, DiskError, FolderInUse

if TYPE_CHECKING:
    from decentral.manifest import Manifest
    from decentral.tasks.evaluate import Survey

# What a run directory holds before a peer has learnt, voted or fetched anything: worth nothing yet.
_WORTHLESS = (
    *("admission.token", "events.jsonl", "identity.key", "journal", "lock", "metrics.jsonl", "requests"),
    *("run.toml", "status.json", "text.begun"),
)
# And what it holds from then on: votes bind, progress is somebody's work.
_WORTH = (
    "acceptor",
    "adopted",
    "checkpoints",
    "download",
    "frames",
    "journal",
    "metrics.jsonl",
    "text",
    "text.begun",
    "text.partial",
)


def is_main() -> bool:
    """Tell whether this process is the one of its peer that writes and talks, as accelerate and torchrun say."""
    return "LOCAL_RANK" not in os.environ or os.environ.get("RANK", "0") == "0"


def look_over(
    directory: Path,
    listen: Sequence[str] | None,
    relays: Sequence[str],
    offload: str | Path | None,
    data: Path | None,
) -> "Survey | None":
    """Return what ``--data`` names. Raises UsageError, ConfigError, ListenError, DiskError or DataError; nothing was
    written.
    """
    from decentral.observe.status import check_free
    from decentral.peer.network_setup import check_relays
    from decentral.tasks.evaluate import survey
    from decentral.transport.base import check_listen

    check_place(directory)
    if is_main():  # the others' main process may live there already
        check_free(directory)
    if listen:
        check_listen(listen)
    check_relays(relays)
    if offload is not None:
        from decentral.tensors.memory import offload_to  # torch

        offload_to(Path(offload))
    return None if data is None else survey(data)


def check_trained_here(manifest: "Manifest") -> None:
    """ConfigError for the run of a script, whose model this program does not have."""
    from decentral.cli.terms import check_fragments

    if manifest.model.task != "causal-lm":
        raise ConfigError(
            f'model.task = "{manifest.model.task}": this command trains causal-lm only; the run has a script of its '
            "own, which python starts, and decentral join INVITE --script TRAIN.py joins with"
        )
    check_fragments(manifest)


def check_first_weights(folder: Path | None, directory: Path, manifest: "Manifest") -> None:
    """UsageError or ConfigError for a ``--from`` that the run cannot begin from; a run that goes on needs none."""
    from decentral.tasks.language_model import check_begins
    from decentral.tasks.sizing import LanguageModelConfig

    if folder is not None and not (directory / "checkpoints").exists():
        check_begins(folder, LanguageModelConfig.of(manifest.model))


def check_place(directory: Path) -> None:
    """DiskError unless files can be made in ``directory``, which need not be there yet."""
    place = next(path for path in (directory, *directory.absolute().parents) if os.path.exists(path))
    doing = "written" if place == directory else "made"
    if not place.is_dir():
        raise DiskError(f"{directory}: cannot be {doing} (Not a directory); choose another place")
    if not os.access(place, os.W_OK | os.X_OK):
        raise DiskError(f"{directory}: cannot be {doing} ({place} is not writable); choose another place")


@dataclass(frozen=True, slots=True)
class Before:
    """The folder as it was before anything was begun."""

    absent: tuple[Path, ...]  # of the folder and those that it is in
    names: frozenset[str]  # in the folder

    @classmethod
    def of(cls, directory: Path) -> "Before":
        """Now."""
        absent = tuple(path for path in (directory, *directory.absolute().parents) if not os.path.exists(path))
        return cls(absent, frozenset() if absent else frozenset(os.listdir(directory)))


@contextmanager
def undo_on_error(directory: Path, before: Before) -> Iterator[None]:
    """An error inside removes what is new in ``directory``, and a new ``directory`` itself, while it is worth nothing.

    Only what a peer makes is removed: others may write there meanwhile. Enter it while the folder is this process's
    alone, or it may remove what the next one has made.
    """
    try:
        yield
    except FolderInUse:
        raise  # what is new there is another process's
    except Exception:
        if not any(_holds_something(directory / name) for name in _WORTH):
            _remove([directory / name for name in _WORTHLESS if name not in before.names], before.absent)
        raise


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists() and path.stat().st_size > 0


def _remove(files: Sequence[Path], folders: Sequence[Path]) -> None:
    for path in files:
        with suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for path in folders:
        with suppress(OSError):  # somebody else put something there
            path.rmdir()


# ---- directories and small files ----
#
# Commands make them, with errors a person can act on.


def make_directory(path: Path) -> Path:
    """Make a directory with its parents, for their owner alone. Raises DiskError."""
    from decentral.state.durable import make_private_folders

    try:
        make_private_folders(path)
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
