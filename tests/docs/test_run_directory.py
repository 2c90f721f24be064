"""docs/run-directory.md against the code: every file, event and metric that it names, and none left out."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from decentral.cli.group import TRACEBACK_FILE
from decentral.cli.identity import KEY_FILE
from decentral.node.folder import ADDRESSES_FILE, MANIFEST_FILE
from decentral.node.upload import UPLOAD_FILE
from decentral.observe.diagnostics import NAMES
from decentral.observe.events import EVENTS_FILE
from decentral.observe.lines import KEPT_FILES, MAX_FILE_NBYTES, PACKED_SUFFIX
from decentral.observe.metrics import METRICS_FILE
from decentral.observe.report import SUMMARY_FILE
from decentral.observe.status import QUANTITIES, STATUS_FILE
from decentral.state.checkpoint import FROZEN
from decentral.training.progress import Away
from tests.kit.families import documented_files

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/run-directory.md").read_text(encoding="utf-8")
FILES, EVENTS, METRICS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
TOLD_BY = {"announce", "_announce", "_emit", "on_event", "_on_event"}
ELSEWHERE = ("decentral/simulate/", "decentral/benchmarks/")  # they have no run directory


def documented_events() -> dict[str, set[str]]:
    """Fields of each event."""
    found = {}
    for names, fields in re.findall(r"^\| (`[^|]+) \| ([^|]*) \|", EVENTS, flags=re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            found[name] = set(fields.split(", "))
    return found


@functools.cache
def told() -> list[tuple[set[str], set[str]]]:
    """Of each place that tells an event by its name: the names it can have, and the fields that stand there."""
    found = []
    for path in sorted((ROOT / "decentral").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and call.args and not name.startswith(ELSEWHERE):
                function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
                names = _constants(call.args[0])
                if function in TOLD_BY and names:
                    found.append((names, _keys(call.args[1])))
    return found


def _constants(node: ast.expr) -> set[str]:
    choices = [node.body, node.orelse] if isinstance(node, ast.IfExp) else [node]
    return {choice.value for choice in choices if isinstance(choice, ast.Constant) and isinstance(choice.value, str)}


def _keys(node: ast.expr) -> set[str]:
    return {key.value for key in node.keys if isinstance(key, ast.Constant)} if isinstance(node, ast.Dict) else set()


def test_every_event_that_the_code_tells_is_there_and_no_other() -> None:
    assert set(documented_events()) == set().union(*(names for names, _ in told()))


def test_the_fields_of_events_are_there() -> None:
    documented = documented_events()
    for names, fields in told():
        for name in names:
            assert fields <= documented[name], f"{name}: docs/run-directory.md names other fields"
    away = Away(0, 1, 1, 1, None)  # type: ignore[arg-type]  # its tensor is told by nobody
    assert set(away.fields()) == documented["away"]


def test_the_files_that_have_names_in_the_code_are_there() -> None:
    named = {
        EVENTS_FILE,
        METRICS_FILE,
        SUMMARY_FILE,
        STATUS_FILE,
        UPLOAD_FILE,
        ADDRESSES_FILE,
        MANIFEST_FILE,
        FROZEN,
        KEY_FILE,
    }
    assert named | {TRACEBACK_FILE} <= documented_files()


def test_the_bounds_are_as_the_page_says() -> None:
    assert MAX_FILE_NBYTES == 16 * 2**20
    assert "has 16 MiB" in FILES
    assert f"`.{KEPT_FILES}`, " in FILES
    assert f"`{Path(EVENTS_FILE).stem}.1.jsonl{PACKED_SUFFIX}`" in FILES
    assert f"{(KEPT_FILES + 1) * 16} MiB each at most" in FILES


def test_every_metric_of_a_training_job_is_there() -> None:
    """Keywords where rows are written, and what a peer's progress adds to those of rounds."""
    rows = dict(re.findall(r"^\| `(inner|outer)` \| ([^|]+) \|", METRICS, flags=re.MULTILINE))
    written: dict[str, set[str]] = {"inner": set(), "outer": set()}
    for path in ("decentral/cli/train.py",):
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in written:
                written[node.func.attr] |= {keyword.arg for keyword in node.keywords if keyword.arg}
            if isinstance(node, ast.FunctionDef) and node.name == "progress_of_status":
                (answer,) = (one.value for one in node.body if isinstance(one, ast.Return))
                written["outer"] |= _keys(answer)
    written["outer"] |= {"bits_per_byte", "diagnosed_round", *NAMES}
    written["outer"] |= {name for name, quantity in QUANTITIES.items() if quantity.logged}
    assert {scope: set(fields.split(", ")) for scope, fields in rows.items()} == written


def test_the_two_counts_of_a_commit_are_told_apart() -> None:
    (row,) = re.findall(r"^\| `commit` \|.*$", EVENTS, flags=re.MULTILINE)
    assert (
        "`outer_step` counts those, as `round` of `decentral status` does, and `round` the records of the chain" in row
    )
    assert "`round` is the height of the chain: each record makes it one higher" in EVENTS
