"""What stays on a real terminal beside the live view: read back from a pseudo-terminal, scrollback included."""

import sys
from pathlib import Path

import pytest

from tests.kit.patience import PATIENCE
from tests.kit.terminals import OnTerminal, Screen

INVITE = "decentral join decentral1:" + "".join(chr(ord("a") + i % 26) for i in range(413))
WARNING = "3 rounds passed by: 30 inner steps are dropped, training goes on from the anchor"
PROGRAM = f"""
import logging, sys
from decentral.observe.screen import log_shown_by
from decentral.observe.status import Status
from decentral.observe.screen import open_display

members = tuple({{"peer": f"12D3KooW{{i:06}}", "round": 3, "path": "direct"}} for i in range(int(sys.argv[1])))
display = open_display(sys.stderr, stop="Ctrl-C, or decentral leave --out decentral-run")
with log_shown_by(display.say):
    for round_ in range(8):
        state = "looking" if round_ % 2 else "training"
        display.show(Status(state=state, round=round_, members=members, peer="12D3KooW000000", loss=2.5))
        if round_ == 2:
            display.result({INVITE!r})
        if round_ == 4:
            logging.getLogger("decentral.peer").warning({WARNING!r})
        if round_ == 5:
            print("a library's own line", file=sys.stderr)
display.close()
print("the last word")
"""


@pytest.mark.parametrize(("columns", "rows", "members"), [(80, 24, 2), (60, 20, 40), (200, 50, 40)])
def test_what_is_said_stays_whole_above_the_live_view_which_is_there_once_and_fits_the_screen(
    tmp_path: Path, columns: int, rows: int, members: int
) -> None:
    with OnTerminal([sys.executable, "-c", PROGRAM, str(members)], columns, rows, cwd=tmp_path) as terminal:
        assert terminal.finish(PATIENCE) == 0
    lines = [line.rstrip() for line in terminal.screen.lines]
    for said in (INVITE, f"warning: {WARNING}", "a library's own line", "the last word"):
        assert lines.count(said) == 1, "\n".join(lines)
    text = "\n".join(terminal.screen.lines)
    for once in ("peer", "…000000 (you)", *(["more"] if members > 12 else [])):
        assert text.count(f"{once} ") + text.count(f"{once},") + text.count(f"{once}\n") == 1, text
    assert "to stop: " not in text  # it has ended
    assert len(terminal.screen.shown) <= rows


def test_the_screen_of_these_tests_wraps_scrolls_and_erases_as_a_terminal_does() -> None:
    screen = Screen(5, 2)
    screen.feed(b"abcdefg\r\nnext\r\n")
    assert screen.lines == ["abcdefg", "next", ""]
    screen.feed(b"\x1b[1A\x1b[2Kmore\r\n\x1b[31mred\x1b[0m")
    assert screen.lines == ["abcdefg", "more", "red"]
    screen.feed(b"\x1b[")
    screen.feed(b"2K\rfive!")
    assert [row.text for row in screen.shown] == ["more", "five!"]
    assert not screen.shown[1].goes_on
