"""Methods by name, or by their spelling: ours, and those that other packages add through an entry point group.

An entry point names a frozen dataclass whose fields all have defaults. It is imported only when it is asked for, and
cannot replace a method of ours. A study in a notebook brings classes of its own to its process, by the same rules.
"""

import dataclasses
import difflib
import math
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points, requires
from typing import Any

from decentral.errors import ConfigError

__all__ = ["Plugins", "added", "make", "nearest", "to_install"]


def added(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, our own extras' among them; none is imported by that."""
    return {point.name: point for point in sorted(entry_points(group=group), key=lambda point: point.name)}


def to_install(extra: str) -> str:
    """Return the command that installs what an extra of ours needs: its packages, as an index may not have ours."""
    mark = re.compile(rf"""extra == ['"]{extra}['"]""")
    told = (text.partition(";") for text in requires("decentral") or ())
    wanted = [shlex.quote(package.strip()) for package, _, marker in told if mark.search(marker)]
    return f"pip install {' '.join(wanted)}"


@dataclass(frozen=True, slots=True)
class Plugins:
    """The methods of one kind."""

    kind: str  # for messages: "compressor"
    group: str  # of entry points
    ours: Mapping[str, Callable[..., Any]]  # Any: each kind has its own protocol
    brought: dict[str, Callable[..., Any]] = field(default_factory=dict)  # to this process alone

    def names(self) -> list[str]:
        """All known names, sorted; imports nothing."""
        return sorted({*self.ours, *self.brought, *added(self.group)})

    def bring(self, maker: type) -> None:
        """Know a class by its ``name`` in this process, as if a package added it; a later one of that name replaces it.

        ConfigError for the name of one of ours, and for what is no frozen dataclass.
        """
        name = getattr(maker, "name", None)
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"{self.kind} {maker.__name__} has no name; write name: ClassVar[str] = 'a_word' in it")
        if self.ours.get(name, maker) is not maker:
            raise ConfigError(f"{self.kind} {maker.__name__}: {name} is the name of one of ours; choose another")
        if not _is_frozen(maker):
            raise ConfigError(f"{self.kind} {name}: write @dataclass(frozen=True) above class {maker.__name__}")
        if name not in self.ours:
            self.brought[name] = maker

    def make(self, name: str, arguments: Mapping[str, float | str | None]) -> Any:
        """The method of a name; ConfigError, with the nearest name, on an unknown name or argument."""
        maker = self.ours.get(name) or self.brought.get(name) or self._load(name)
        fields = dataclasses.fields(maker)  # type: ignore[arg-type]  # checked
        wanted, defaults = {one.name: one.type for one in fields}, {one.name: one.default for one in fields}
        given = dict(arguments)
        for key, value in arguments.items():
            if key not in wanted:
                raise ConfigError(f"{self.kind} {name} has no {key}; {nearest(key, wanted)}")
            if value is None and defaults[key] is None:
                continue
            if wanted[key] in (str, "str"):
                if not isinstance(value, str):
                    raise ConfigError(f"{self.kind} {name}: {key}={value!r} must be a word")
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{self.kind} {name}: {key}={value!r} must be a number")
            if wanted[key] in (int, "int"):
                if not math.isfinite(value) or value != int(value):
                    raise ConfigError(f"{self.kind} {name}: {key}={value} must be a whole number")
                given[key] = int(value)  # 8.0 is how a manifest's digest spells 8
        return maker(**given)

    def _load(self, name: str) -> Callable[..., Any]:
        point = added(self.group).get(name)
        if point is None:
            raise ConfigError(f"{self.kind} {name} is not known here; {_way_out(nearest(name, self.names()))}")
        try:
            loaded = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{self.kind} {name}: its package does not load ({error}); reinstall it") from error
        if not _is_frozen(loaded):
            raise ConfigError(f"{self.kind} {name}: its entry point is no dataclass that is frozen; ask its author")
        made: Callable[..., Any] = loaded
        return made


def _is_frozen(found: object) -> bool:
    return isinstance(found, type) and dataclasses.is_dataclass(found) and found.__hash__ is not None


def _way_out(hint: str) -> str:
    """A peer whose run uses a package that is not installed here meant every letter of the name."""
    return f"if a package adds it, install that package{', or ' if hint.startswith('did you mean') else '; '}{hint}"


def nearest(word: str, names: Collection[str]) -> str:
    """The end of a message about an unknown name: what was meant, or all there is."""
    close = difflib.get_close_matches(word, list(names), n=1, cutoff=0.55)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names) or 'nothing'}"


# ---- spelling of one method ----
#
# ``name`` or ``name(key=number, ...)``; a key that is a word has one.

_METHOD = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:\(([^()]*)\))?\s*", re.ASCII)
_ARGUMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*([^\s=]+)\s*", re.ASCII)


def make(word: str, methods: Plugins, example: str) -> Any:
    """The method of a spelling; ConfigError, with the nearest name, when there is none."""
    match = _METHOD.fullmatch(word)
    if match is None:
        raise ConfigError(f'{methods.kind} "{word.strip()}": want name or name(key=number, ...), such as {example}')
    return methods.make(match[1], _arguments(match[2] or "", f"{methods.kind} {match[1]}"))


def _arguments(text: str, method: str) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for word in text.split(",") if text.strip() else []:
        match = _ARGUMENT.fullmatch(word)
        if match is None:
            raise ConfigError(f'{method}: "{word.strip()}" is not key=number')
        if match[1] in found:
            raise ConfigError(f"{method}: {match[1]} is given twice; keep one")
        found[match[1]] = _value(match[2], method)
    return found


def _value(word: str, method: str) -> float | str:
    """A number, or a word, of which ``Plugins.make`` knows whether one belongs there."""
    try:
        return int(word) if re.fullmatch(r"[+-]?\d+", word, re.ASCII) else float(word)
    except ValueError:
        if not re.fullmatch(r"[A-Za-z_]\w*", word, re.ASCII):
            raise ConfigError(f'{method}: "{word}" is neither a number nor a word') from None
        return word
