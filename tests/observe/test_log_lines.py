import io
import logging

from decentral.observe.health import alone_sentence
from decentral.observe.screen import PlainDisplay, log_shown_on
from decentral.observe.status import Status

LOG = logging.getLogger("decentral.peer")


def said(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()[1:]  # without how to stop


def test_what_the_library_warns_of_is_a_line_of_the_display_while_it_is_there() -> None:
    stream = io.StringIO()
    with log_shown_on(PlainDisplay(stream, stop="Ctrl-C")):
        logging.addLevelName(logging.WARNING, "WARN")  # as hivemind does
        LOG.warning("%d rounds passed by", 3)
        logging.addLevelName(logging.WARNING, "WARNING")
        LOG.info("not this")
        logging.getLogger("another").warning("nor this")
    LOG.warning("nor what comes after")
    assert said(stream) == ["warning: 3 rounds passed by"]


def test_a_word_of_a_peer_cannot_steer_the_terminal() -> None:
    stream = io.StringIO()
    with log_shown_on(PlainDisplay(stream, stop="Ctrl-C")):
        LOG.warning("it says %s", "\x1b[2Jhello\rthere\u202e")
    assert "\x1b" not in stream.getvalue()
    assert "".join(said(stream)).endswith("there?")


def test_a_traceback_is_told_line_by_line() -> None:
    stream = io.StringIO()
    with log_shown_on(PlainDisplay(stream, stop="Ctrl-C")):
        try:
            raise ValueError("a bug")
        except ValueError:
            LOG.exception("handler failed")
    assert said(stream)[0] == "error: handler failed"
    assert said(stream)[-1] == "ValueError: a bug"


def test_the_status_does_not_say_again_what_was_logged_just_now() -> None:
    stream, now = io.StringIO(), [0.0]
    display = PlainDisplay(stream, stop="Ctrl-C", monotonic=lambda: now[0])
    gone = Status(state="looking", gone=("aaa",), gone_left=True, inner_steps=83)
    with log_shown_on(display):
        LOG.warning(alone_sentence(["aaa"], left=True))
        display.show(gone)
    assert said(stream) == ["warning: alone: aaa left; the invite still lets others in"]
    now[0] += 20.0
    display.show(Status(state="training"))
    display.show(gone)
    assert said(stream)[-1].startswith("alone: aaa left; the invite still lets others in; training on alone")
