"""What ``--data`` names, looked through before anything is started: how much it is, whether it is text, and which.

The terms of a run name a corpus by a label and, where all peers are to have the same, by a digest: blake2b-256 of the
tokens, which here are the bytes. Streamed: a chunk is in memory at a time, whatever the corpus holds.
"""

import codecs
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decentral.errors import DataError
from decentral.manifest.terms import Data
from decentral.tasks.corpus import check_size, chunks

# Shares measured: source code and UTF-8 prose 1.00, French with every tenth letter accented in Latin-1 0.81; random
# bytes, PNG and gzip 0.48, an executable 0.11.
LEAST_TEXT = 0.75
_NAMED = 3  # files that are passed over
_CONTROL = bytes({*range(32), 127} - set(b"\t\n\v\f\r\x1b"))
_DOMAIN = b"decentral corpus 1\n"
_NOT_UTF8 = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Survey:
    """What was read at ``path``; ``digest`` in hex."""

    path: Path
    num_files: int
    nbytes: int
    text_share: float  # of the bytes, those that are UTF-8 and no control characters
    digest: str
    left_out: str = ""  # what was passed over, and why

    def __str__(self) -> str:
        files, share = f"{_files(self.num_files)}{self.left_out}", f"{100 * self.text_share:.1f} % of it text"
        return f"{self.path}: {files}, {self.nbytes:,} bytes, {share}, digest {self.digest[:8]}"


def survey(path: Path) -> Survey:
    """Look through a file or a folder. Raises DataError for what cannot be trained on."""
    passed_over: list[Path] = []
    digest, decoder = hashlib.blake2b(_DOMAIN, digest_size=32), codecs.getincrementaldecoder("utf-8")("replace")
    files, nbytes, foreign = set[Path](), 0, 0
    for file, chunk in chunks(path, passed_over.append):
        files.add(file)
        digest.update(chunk)
        nbytes += len(chunk)
        foreign += len(chunk) - len(chunk.translate(None, _CONTROL)) + decoder.decode(chunk).count(_NOT_UTF8)
    left_out = _left_out(path, passed_over)
    check_size(nbytes, f"--data {path}", f" in {_files(len(files))}{left_out}" if path.is_dir() else "")
    found = Survey(path, len(files), nbytes, 1 - foreign / nbytes, digest.hexdigest(), left_out)
    if found.text_share < LEAST_TEXT:
        raise DataError(
            f"--data {path} is no text: {100 * found.text_share:.0f} % of its {nbytes} bytes are UTF-8 text, at least "
            f"{100 * LEAST_TEXT:.0f} % are needed; name text, converted to UTF-8 where it has another encoding"
        )
    return found


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count:,} files"


def _left_out(folder: Path, files: Sequence[Path]) -> str:
    """What was not read of a folder, and why; empty where that is nothing."""
    if not files:
        return ""
    nbytes = sum(file.stat().st_size for file in files)
    names = ", ".join(str(file.relative_to(folder)) for file in files[:_NAMED]) + ", ..." * (len(files) > _NAMED)
    named = f"{_files(len(files))} of {nbytes:,} bytes passed over, {names}"
    return f" ({named}: zero bytes near the beginning, so no text)"


def check_agreed(terms: Data, found: Survey | None) -> str:
    """What is to be said about this peer's text. Raises DataError unless it is what the run trains on."""
    label, own = terms.corpus, "make a run of your own text: decentral init RUN.toml --data"
    if found is None:
        if label != "stdlib":
            raise DataError(f"the run trains on {label}; name your copy of it with --data PATH")
        return "this peer's text is the standard library's source"
    if label == "stdlib":
        raise DataError(
            f'data.corpus = "stdlib": the run trains on the standard library, and --data {found.path} is other text; '
            f"drop --data, or {own} {found.path}"
        )
    if terms.digest is None:
        return f"this peer's text is {found}; the run asks for no digest: each peer may bring its own {label}"
    if terms.digest != found.digest:
        raise DataError(
            f"--data {found.path} is other text than the run's {label}: its digest is {found.digest[:8]}, the run's "
            f"{terms.digest[:8]}; name the same text, or {own} {found.path}"
        )
    return f"this peer's text is {found}: the run's {label}"
