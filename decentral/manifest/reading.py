"""From text to a checked manifest: files and what peers send. Both are bounded before they are parsed."""

from __future__ import annotations

import tomllib
from pathlib import Path

from decentral.errors import ConfigError
from decentral.manifest.checking import one_line
from decentral.manifest.presets import check_methods
from decentral.manifest.terms import Manifest

MAX_NBYTES = 64 * 1024  # ours take 3 kB; the text may come from a peer
MAX_DOTS = 64  # in a line: the parser's time grows with the square of a dotted key, 20 s for one of 30,000 words


def load_manifest(path: str | Path) -> Manifest:
    """The manifest in a file, with its method and compressor checked (imports torch). Raises ConfigError."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_NBYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{path}: cannot be read ({reason}); write one with: decentral init {path}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); a manifest is a TOML file") from error
    manifest = parse_manifest(text, source=str(path))
    try:
        check_methods(manifest)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return manifest


def parse_manifest(text: str, source: str = "manifest") -> Manifest:
    """The manifest of a text; method and compressor are checked by ``check_methods``. Raises ConfigError."""
    if len(text) > MAX_NBYTES:
        raise ConfigError(f"{source}: longer than {MAX_NBYTES} bytes; a manifest is a short TOML file")
    if any(line.count(".") > MAX_DOTS for line in text.split("\n")):
        raise ConfigError(f"{source}: a line has more than {MAX_DOTS} dots; no key of ours is nested that deep")
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: its syntax error, and numbers of 5000 digits
        reason = one_line(error) if isinstance(error, ValueError) else "nested too deeply"
        raise ConfigError(f"{source}: not TOML: {reason}; correct that place") from None
    return Manifest.of(tables, source)
