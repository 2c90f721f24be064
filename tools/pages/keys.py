"""The reference of the manifest: every table and key with its default and its comment, and each preset as a file."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from decentral.manifest import Manifest
from decentral.manifest.presets import preset_manifest
from decentral.manifest.table import toml_value
from decentral.optimizers import presets

_TOP = """# Manifest

Every key of `run.toml`, with the default it has where a preset says nothing else. A method's own keys stand in
[its section](../optimizers.md); `decentral init RUN.toml --preset NAME` writes all of them with their comments.
"""


def page() -> str:
    """The page, in Markdown."""
    return _TOP + "".join(_tables("", Manifest)) + "\n## What init writes\n" + "".join(map(_preset, presets()))


def _tables(name: str, table: type[BaseModel]) -> list[str]:
    inside = {key: found for key, field in table.model_fields.items() if (found := _table_in(field.annotation))}
    plain = {key: field for key, field in table.model_fields.items() if key not in inside}
    mine = [f"\n## [{name}]\n\n{_first_sentence(table)}\n\n{_rows(plain)}"] if name else []
    return mine + [text for key, found in inside.items() for text in _tables(f"{name}.{key}".lstrip("."), found)]


def _table_in(kind: Any) -> type[BaseModel] | None:  # Any: whatever an annotation may be
    for one in (kind, *get_args(kind)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _rows(fields: dict[str, FieldInfo]) -> str:
    head = "| key | default | |\n|---|---|---|\n"
    return head + "".join(
        f"| `{key}` | {_default(field)} | {_cell(field.description)} |\n" for key, field in fields.items()
    )


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=False)
    if value is PydanticUndefined:
        return "the preset's"
    return "unset" if value is None else f"`{toml_value(value)}`"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


def _first_sentence(table: type[BaseModel]) -> str:
    return (table.__doc__ or "").strip().split("\n\n")[0].split(". ")[0].rstrip(".") + "."


def _preset(name: str) -> str:
    return f"\n### {name}\n\n```toml\n{preset_manifest(name, run={'name': 'mine'}).to_toml()}```\n"
