"""A zip to send along with a question: how a peer is and was, without what is secret or private."""

from __future__ import annotations

import ipaddress
import json
import re
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from decentral.cli.checks import examine
from decentral.errors import DiskError, UsageError
from decentral.observe.events import read_events
from decentral.observe.lines import read_json_lines
from decentral.observe.metrics import METRICS_FILE
from decentral.observe.status import STATUS_FILE
from decentral.swarm.invite import TOKEN_FILE

# ---- the files of the zip ----
#
# Versions, doctor, terms, status, the last events and numbers. Never a key, a model or data.

LAST_EVENTS, LAST_NUMBERS = 5000, 2000
_AS_THEY_ARE = ("run.toml", STATUS_FILE, "summary.json", "error.txt")  # redacted, too


def write_support(directory: Path, to: Path, *, examined: bool) -> list[str]:
    """Write the zip; returns the names in it. UsageError where no peer has run, or when ``to`` is there."""
    if not (directory / STATUS_FILE).exists():
        raise UsageError(f"{directory}: no peer has run here; name the directory it was started with by --out")
    if to.exists():
        raise UsageError(f"{to} is there already; name another file with --to")
    redact = Redaction(_secrets(directory), _home())
    try:
        with zipfile.ZipFile(to, "x", zipfile.ZIP_DEFLATED) as file:
            for name, text in _texts(directory, examined=examined):
                file.writestr(name, redact(text))
            return file.namelist()
    except OSError as error:
        to.unlink(missing_ok=True)
        raise DiskError(f"{to}: cannot be written ({error.strerror}); name another place with --to") from error


def _home() -> str:
    try:
        return str(Path.home())
    except RuntimeError:  # a user without an entry, as in a container
        return ""


def _texts(directory: Path, *, examined: bool) -> Iterator[tuple[str, str]]:
    for name in _AS_THEY_ARE:
        if (directory / name).is_file():
            text = (directory / name).read_text(encoding="utf-8", errors="replace")
            yield name, _without_sample(text) if name == STATUS_FILE else text
    yield "events.jsonl", _lines(read_events(directory, last=LAST_EVENTS))
    yield "metrics.jsonl", _lines(deque(read_json_lines(directory / METRICS_FILE), maxlen=LAST_NUMBERS))
    yield "folder.txt", "".join(_sizes(directory))
    if examined:
        yield "doctor.json", json.dumps([asdict(finding) for finding in examine(directory, None)], indent=1)


def _without_sample(status: str) -> str:
    """Leave out what the model says: it goes on from words of this peer's text."""
    with suppress(ValueError):
        if isinstance(fields := json.loads(status), dict):
            return json.dumps({key: value for key, value in fields.items() if key != "sample"}, indent=1)
    return status


def _lines(rows: Iterator[dict[str, object]] | deque[dict[str, object]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _sizes(directory: Path) -> Iterator[str]:
    """Yield what there is and how large: a checkpoint that is missing or empty shows here."""
    for path in sorted(directory.rglob("*")):
        with suppress(FileNotFoundError):  # the peer has removed it since
            if path.is_file():
                yield f"{path.stat().st_size:>14} {path.relative_to(directory)}\n"


def _secrets(directory: Path) -> Iterator[str]:
    path = directory / TOKEN_FILE
    if path.is_file():
        yield path.read_text(encoding="utf-8", errors="replace").strip()


# ---- taking out what is private ----
#
# That is nobody else's business: keys, tokens, invites, addresses, names of people. Pure.

_INVITE = re.compile(r"decentral1:[A-Za-z0-9_-]+")
_NAMED = re.compile(r"/(dns|dns4|dns6|dnsaddr)/[^/\s\"',]+")
_IP4, _IP6 = r"\d{1,3}(?:\.\d{1,3}){3}", r"[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?:%\w+)?"
_ADDRESS = re.compile(rf"(?<![\w.:])(?:{_IP4}|{_IP6})(?![\w.])")


class Redaction:
    """Replaces the same address by the same word everywhere, so that who reads it can still tell two apart."""

    def __init__(self, secrets: Iterable[str], home: str) -> None:
        self._secrets = sorted((one for one in secrets if one), key=len, reverse=True)
        self._home = re.compile(re.escape(home) + r"(?![\w.-])") if len(home) > 1 else None
        self._hosts: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        """Return the text without them."""
        for secret in self._secrets:
            text = text.replace(secret, "[secret]")
        text = _INVITE.sub("decentral1:[invite]", text)
        if self._home is not None:
            text = self._home.sub("~", text)
        text = _NAMED.sub(lambda found: f"/{found[1]}/{self._host(found[0])}", text)
        return _ADDRESS.sub(lambda found: self._address(found[0]), text)

    def _address(self, text: str) -> str:
        try:
            found = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            return text  # a version, a time of day, a digest
        if found.is_loopback or found.is_unspecified:
            return text
        return self._host(text)

    def _host(self, text: str) -> str:
        return self._hosts.setdefault(text, f"host{len(self._hosts) + 1}")
