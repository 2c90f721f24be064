from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from decentral import signals
from decentral.signals import StopSignals
from tests.kit.patience import PATIENCE

pty = pytest.importorskip("pty", reason="no SIGHUP and no fork there")


class Asked:
    """A peer, as far as signals know it."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.in_step = False

    def signals(self) -> StopSignals:
        found = StopSignals(
            lambda: self.words.append("leave"), lambda: self.words.append("hurry"), lambda: self.in_step
        )
        found.politely()
        return found


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As a process has them, whoever started this one."""
    kinds = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, kind) for number, kind in kinds.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_first_signal_asks_to_leave_and_says_how_the_process_is_to_end(asked: Asked, number: signal.Signals) -> None:
    with asked.signals() as heard:
        signal.raise_signal(number)
    assert (asked.words, heard.code) == (["leave"], 128 + number)
    assert signal.getsignal(number) == signal.SIG_DFL


def test_a_second_sigterm_ends_the_loop_where_it_is(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ONE_SIGNAL", 0.0)
    with asked.signals():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
    assert (asked.words, ended.value.code) == (["leave"], 143)


def test_ctrl_c_in_a_step_that_was_cut_off_is_forgotten_where_the_loop_goes_on(asked: Asked) -> None:
    with asked.signals() as heard:
        asked.in_step = True
        signal.raise_signal(signal.SIGINT)
        heard.step_begins(done=False)  # what waited in the step raised it, and the loop caught that
        signal.raise_signal(signal.SIGINT)  # the next one does not cut this step
        asked.in_step = False
        with pytest.raises(KeyboardInterrupt):
            heard.step_ends()


def test_what_timeout_sends_twice_is_one_sigterm_and_a_terminal_closes_once(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "ONE_SIGNAL", 60.0)
    with asked.signals():
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGHUP):
            signal.raise_signal(number)
    assert asked.words == ["leave", "leave"]


def test_what_is_ignored_stays_ignored(asked: Asked) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with asked.signals() as heard:
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert (asked.words, heard.code) == ([], None)


def test_who_handled_it_before_is_called_too_and_decides_what_becomes_of_the_process(asked: Asked) -> None:
    def theirs(number: int, frame: object) -> None:
        asked.words.append("theirs")

    signal.signal(signal.SIGTERM, theirs)
    with asked.signals() as heard:
        signal.raise_signal(signal.SIGTERM)
        heard.step_begins(done=True)  # no SystemExit
    assert (asked.words, heard.code) == (["leave", "theirs"], None)
    assert signal.getsignal(signal.SIGTERM) == theirs


def test_who_takes_a_signal_over_meanwhile_keeps_it(asked: Asked) -> None:
    with asked.signals():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_ctrl_c_in_a_step_is_handled_at_its_end_and_a_second_one_at_once(asked: Asked) -> None:
    with asked.signals() as heard:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        asked.in_step = True
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            heard.step_ends()
        heard.step_ends()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_loop_that_trains_on_is_ended_and_one_that_is_told_later_gets_two_steps(asked: Asked) -> None:
    with asked.signals() as heard:
        heard.step_begins(done=True)
        signal.raise_signal(signal.SIGTERM)
        heard.step_begins(done=False)
        heard.step_begins(done=False)
        with pytest.raises(SystemExit):
            heard.step_begins(done=False)


def test_no_handler_is_set_on_another_thread(asked: Asked) -> None:
    found: list[object] = []

    def look() -> None:
        with asked.signals():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


def in_a_fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            work()
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it is multi-threaded
def test_a_worker_that_was_forked_ends_by_sigterm_and_leaves_a_closing_terminal_to_its_parent(asked: Asked) -> None:
    with asked.signals():
        assert in_a_fork(lambda: signal.raise_signal(signal.SIGTERM)) == -signal.SIGTERM
        assert in_a_fork(lambda: signal.raise_signal(signal.SIGHUP)) == 7
    assert asked.words == []


IMPORTS = """
import _imp, signal, sys, threading
from decentral import signals

def interrupt_import(is_held, main):
    _imp.acquire_lock()
    is_held.set()
    while sys._current_frames()[main].f_code.co_filename != signals.IMPORTS:
        interrupted.wait(0.001)
    signal.pthread_kill(main, signal.SIGINT)
    _imp.release_lock()

is_held, interrupted = threading.Event(), threading.Event()
other = threading.Thread(target=interrupt_import, args=(is_held, threading.get_ident()))
with signals.StopSignals(lambda: None, lambda: None, lambda: False) as heard:
    heard.politely()
    other.start()
    is_held.wait()
    try:
        import colorsys
        interrupted.wait()
    except KeyboardInterrupt:
        print("heard", _imp.lock_held())
other.join()
"""


def test_ctrl_c_while_a_module_is_imported_leaves_no_lock_of_imports_behind() -> None:
    """A process that compiled beside its imports hung after Ctrl-C, where the machine was busy."""
    found = subprocess.run([sys.executable, "-c", IMPORTS], stdout=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert found.stdout.split() == ["heard", "False"]


def test_an_import_that_goes_on_for_ever_is_interrupted_after_a_while(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "HELD_BACK", 0.1)
    forever = compile("import signal\nsignal.raise_signal(signal.SIGINT)\nwhile True: pass", signals.IMPORTS, "exec")
    with asked.signals(), pytest.raises(KeyboardInterrupt):
        exec(forever, {})
    assert asked.words == ["hurry"]


LEAVES = """
import signal, sys, time
from decentral.signals import StopSignals
left = []
with StopSignals(lambda: left.append(1), lambda: None, lambda: False) as heard:
    heard.politely()
    print("up", flush=True)
    while not left:
        time.sleep(0.01)
    print("a word to nobody", flush=True)
sys.exit(heard.code)
"""


def test_words_to_a_terminal_that_has_closed_do_not_fail() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", LEAVES])
    while b"up" not in os.read(terminal, 100):
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
