import signal

import pytest

from decentral.cli.group import stop_signals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_gently_and_is_remembered_as_its_exit_code(number: signal.Signals, code: int) -> None:
    asked = []
    with stop_signals() as stop:
        stop.gently(lambda: asked.append(number))
        signal.raise_signal(number)
        assert (asked, stop.code) == ([number], code)


def test_the_second_signal_ends_at_once() -> None:
    with stop_signals() as stop:
        stop.gently(lambda: None)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_before_anything_can_be_left_gently_a_signal_ends_at_once() -> None:
    with stop_signals(), pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143


def test_the_handlers_are_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with stop_signals():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
