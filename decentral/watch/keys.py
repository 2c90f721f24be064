"""What keys do, as the bottom line and the page of help say it, and what is asked before. Pure."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from decentral.watch.cells import fit, shown

REQUESTS = {"p": "pause", "r": "resume", "f": "finish", "l": "leave"}  # a key each
_KEYS = (*REQUESTS.items(), ("?", "help"), ("q", "close"))
_QUESTIONS = {
    "pause": "It stays in the swarm and contributes nothing until it is resumed.",
    "resume": "It contributes again, and trains on if training had stopped.",
    "finish": "It trains on until its next round is committed, and leaves then.",
    "leave": "It finishes its round and leaves; a checkpoint is kept.",
}
HELP = (
    ("p, r", "pause and resume this peer"),
    ("f", "finish: leave once its next round is committed"),
    ("l", "leave: finish the round that is made now, say goodbye"),
    ("", "each asks first; y is yes, every other key no"),
    ("up, down", "further peers, also PgUp and PgDn"),
    ("left, right", "another peer of a folder that holds several"),
    ("q", "close this view; the peer goes on"),
    ("", ""),
    ("last ●", "its update was in the last round; ○ it was not"),
    ("rounds", "as high as one took long"),
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
        line = line + Text(f" {key} ", style="bold") + Text(f"{does} ")
    return line


def question(request: str, peer: str) -> tuple[str, str]:
    """What is asked before a request is left, and what it would do."""
    whom = f" {shown(peer)}" if peer else ""
    return f"{request} this peer{whom}? y/n", _QUESTIONS[request]


def help_text() -> Text:
    """The page of help."""
    lines = [Text(f"{key:<13}", style="bold") + Text(does) for key, does in HELP]
    return Text("\n").join(lines)
