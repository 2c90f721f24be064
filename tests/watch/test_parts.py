"""The pure half of the view: from the page's view to lines of a terminal."""

from __future__ import annotations

import math
from typing import Any

import pytest
from rich.cells import cell_len

from decentral.watch.cells import fit, pad, shown, wrap
from decentral.watch.panels import caption_of_loss as caption
from decentral.watch.panels import health, legend, loss, news, others, own, spread, strip, title
from decentral.watch.picture import REQUESTS, bottom, places, question

WIDE = "日本語の長い名前"


def peer(name: str, **more: Any) -> dict[str, Any]:
    return {"short": name, "presence": "live", "path": "direct", "in_last_round": True, **more}


def rounds(*seconds: object, **more: Any) -> dict[str, Any]:
    made = {"contributors": [0, 1], "late": [], "contributed": True, **more}
    return {"rounds": [{"step": at, "seconds": one, **made} for at, one in enumerate(seconds)]}


def test_signs_that_take_two_cells_are_cut_to_the_width_too() -> None:
    for width in range(20):
        line = fit(WIDE, width).plain
        assert cell_len(line) <= width
        assert line == WIDE or not width or line.endswith("…")
        assert pad(WIDE, width, right=True).cell_len == pad(WIDE, width).cell_len == width


def test_what_cannot_be_printed_becomes_a_question_mark() -> None:
    assert shown("a\x1b[2J\r\n\u202eb\ud800\u200d") == "a?[2J???b??"
    assert len(shown("e" + 10_000 * "\u0301")) <= 1000


def test_a_sentence_is_broken_between_words_and_its_rest_is_an_ellipsis() -> None:
    assert wrap("one two three four", 9, 2) == ["one two", "three …"]
    assert wrap("one two three", 9, 2) == ["one two", "three"]
    assert wrap("a-word-without-any-blank and more", 9, 1) == ["a-word-w…"]
    assert wrap("", 9, 2) == [""]


def test_the_word_of_health_has_the_colour_of_its_mood() -> None:
    for word, style in (("healthy", "green"), ("gone", "bold red"), ("late", "yellow"), ("paused", "cyan")):
        (span,) = health({"word": word, "health": f"{word}: and why"}, 40, 1).spans
        assert (span.style, span.start, span.end) == (style, 1, len(word) + 2)


def test_the_title_tells_which_of_several_folders_it_is_however_long_the_run_is_called() -> None:
    line = title({"run": {"name": 9 * WIDE, "round": 3}}, 60, folder="peer-1", at=1, of=4)
    assert line.plain.endswith("… peer-1, 2 of 4 ")
    assert line.cell_len == 60


@pytest.mark.parametrize("width", [30, 39, 80])
def test_of_a_name_and_letters_the_name_is_cut(width: int) -> None:
    called = {"called": "A_name-of-16char", "letters": "…aaaaaa"}
    lines = others(
        {"peers": [peer("A_name-of-16char (aaaaaa)", **called), peer("…bbbbbb")]}, width, 3
    ).plain.splitlines()
    assert lines[1].startswith("A_name-of-… (aaaaaa)  ●")
    assert lines[2].startswith("…bbbbbb" + 13 * " " + "  ●")
    assert all(cell_len(line) <= width for line in lines)
    short = others({"peers": [peer("Ann (aaaaaa)", called="Ann", letters="…aaaaaa")]}, width, 3).plain.splitlines()
    assert short[1].startswith("Ann (aaaaaa)  ●")
    hostile = {"called": "\x1b[2J" + 10_000 * "\u0301", "letters": WIDE}
    assert cell_len(others({"peers": [peer(WIDE, **hostile)]}, width, 3).plain.splitlines()[1]) <= width


def test_bars_are_as_high_as_rounds_took_long_and_one_stall_does_not_flatten_the_others() -> None:
    assert strip(rounds(1.0, 2.0, 4.0), 9, 2).plain == "▂▄█\n●●●"
    assert strip(rounds(*[1.0] * 30, 3600.0), 31, 2).plain == 31 * "█" + "\n" + 31 * "●"
    assert strip(rounds(1.0, 2.0), 9, 3).plain == " █\n██\n●●"
    assert strip(rounds(None, 2.0), 9, 2).plain == "▂█\n●●"
    assert strip(rounds(1.0, 2.0, 4.0), 2, 2).plain == "▄█\n●●"


@pytest.mark.parametrize(
    ("made", "mark"),
    [({}, "●"), ({"late": [2]}, "◐"), ({"contributed": False}, "○"), ({"contributed": False, "late": [0]}, "○")],
)
def test_a_mark_says_without_colours_who_was_in_a_round(made: dict[str, Any], mark: str) -> None:
    assert strip(rounds(1.0, **made), 9, 2).plain.endswith(f"\n{mark}")


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, "1", None, True, [1.0], {}])
def test_what_is_no_number_is_drawn_as_not_known(value: object) -> None:
    assert strip(rounds(1.0, value), 9, 2).plain == "█▂\n●●"
    assert caption({"training": {"loss": [1.0, value]}})[0] == "training loss: 1.000"
    assert "loss     not known" in own({"me": {"loss": value, "bytes_sent": value}}, 40, 9).plain
    assert "?" in others({"peers": [peer("a", answers_in=value, seen=value, path=value, round=value)]}, 200, 3).plain
    assert news({"events": [{"t": value, "text": value}]}, 40, 1).plain.startswith(" --:--:--  ")


def test_gossip_steps_have_marks_of_their_own() -> None:
    alone = rounds(1.0, disagreement=0.1, contributors=[])
    assert strip(alone, 9, 2).plain.endswith("\n○")
    assert legend(alone) == "● met a partner  ○ alone"
    assert legend(rounds()) == ""


def test_a_long_curve_is_drawn_in_means_and_a_short_one_over_more_cells() -> None:
    assert spread([4.0, 2.0, 3.0, 1.0], 2) == [3.0, 2.0]
    assert spread([4.0, 2.0], 5) == [4.0, 4.0, 2.0, 2.0]
    assert spread([1.0], 100) == [1.0] * 4
    assert spread([], 5) == []
    assert len(spread([1.0] * 801, 76)) == 76


def test_held_out_loss_is_drawn_where_no_training_loss_is_told() -> None:
    learning = {"training": {"loss": [None]}, "held_out": {"bits_per_byte": [3.0, None, 2.0]}}
    assert caption(learning) == ("held-out loss, bits per byte: 2.000", "2.000 to 3.000")
    assert loss(learning, 2, 1).plain == "█▁"
    assert caption({}) == ("loss", "")


def test_a_wider_panel_has_more_columns_and_never_half_of_one() -> None:
    now = {"peers": [peer("…abcdef", answers_in=0.012, bytes_sent=5e6, bytes_received=2e6, seen=3)]}
    assert others(now, 24, 3).plain.split("\n")[0].split() == ["peer", "last", "path"]
    assert others(now, 40, 3).plain.split("\n")[0].split() == ["peer", "last", "path", "answers"]
    assert " ".join(others(now, 200, 3).plain.split()[-14:]) == "…abcdef ● direct 12 ms 5.0 MB 2.0 MB 3.0 s ago ? ?"


def test_who_is_gone_has_that_in_place_of_a_path() -> None:
    now = {"peers": [peer("a", presence="gone"), peer("b", presence="left", in_last_round=None)]}
    assert [line.split()[1:3] for line in others(now, 24, 3).plain.split("\n")[1:]] == [["●", "gone"], ["·", "left"]]


def test_rates_are_told_of_a_peer_that_runs_only() -> None:
    me = {"state": "training", "bytes_sent": 5e6, "sent_per_second": 1e6, "rounds_seen": 4, "rounds_contributed": 1}
    alive, gone = own({"me": me, "alive": True}, 40, 9).plain, own({"me": me, "alive": False}, 40, 9).plain
    assert "sent     5.0 MB, 1.0 MB/s" in alive
    assert "sent     5.0 MB\n" in gone
    assert "state    training" in alive
    assert "state    gone" in gone
    assert "useful   1 of 4 rounds" in alive


def test_parts_fill_the_screen_and_no_more() -> None:
    for height in range(6, 120):
        at = places(80, height, 1)
        assert at.left + at.right == 80
        assert 2 + at.health + at.panels + at.strip + at.loss + at.news == height


def test_the_last_line_leaves_out_whole_keys_only_and_an_answer_takes_their_place() -> None:
    assert bottom(80, several=True).plain.endswith(" q close  → next peer ")
    assert bottom(20).plain == " p pause  r resume "
    assert bottom(20, said="asked: the peer will pause").plain == " asked: the peer wi…"


def test_every_request_has_a_question() -> None:
    for request in REQUESTS.values():
        asks, means = question(request, "…abcdef")
        assert "this peer …abcdef" in asks
        assert asks.endswith("? y/n")
        assert request in asks
        assert means.endswith(".")
