"""What keys do, as the bottom line and the page of help say it, and what is asked before. Pure."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from decentral.watch.cells import fit, shown

REQUESTS = {"p": "pause", "r": "resume", "f": "finish", "l": "leave"}  # a key each
_KEYS = (*REQUESTS.items(), ("?", "help"), ("q", "close"))
_QUESTIONS = {
    "pause": "pause {}?",
    "resume": "resume {}?",
    "finish": "let {} finish?",
    "leave": "let {} leave?",
}
_MEANS = {
    "pause": "It stays in the swarm and contributes nothing until it is resumed.",
    "resume": "It contributes again, and trains on if training had stopped.",
    "finish": "It leaves once its next round is committed, at once where it is paused or rests.",
    "leave": "It leaves at its next step; a checkpoint is kept.",
}
HELP = (
    ("p, r", "pause this peer, resume it"),
    ("f", "finish: leave with its next round"),
    ("l", "leave: at the next step"),
    ("", "each asks first: y is yes"),
    ("up, down", "further peers; PgUp, PgDn"),
    ("left, right", "another peer of this folder"),
    ("q", "close this view, the peer goes on"),
    ("", ""),
    ("last", "● in the last round, ○ not in it"),
    ("rounds", "bars: how long each took"),
    ("● ◐ ○", "all in, not everybody, not yours"),
)


def bottom(width: int, *, said: str = "", several: bool = False) -> Text:
    """The last line: the answer to what was asked last, else the keys, as many as fit."""
    if said:
        return fit(Text(f" {shown(said)}", style="bold"), width)
    keys = [*_KEYS, ("→", "next peer")] if several else list(_KEYS)
    line = Text()
    for key, does in keys:
        if line.cell_len + cell_len(f" {key} {does} ") > width:
            break
        line = Text.assemble(line, (f" {key} ", "bold"), f"{does} ")
    return line


def question(request: str, peer: str) -> tuple[str, str]:
    """What is asked before a request is left, and what it would do."""
    whom = f"this peer {shown(peer)}" if peer else "this peer"
    return f"{_QUESTIONS[request].format(whom)} y/n", _MEANS[request]


def help_text() -> Text:
    """The page of help."""
    lines = [Text.assemble((f"{key:<13}", "bold"), does) for key, does in HELP]
    return Text("\n").join(lines)
