import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import decentral
from decentral.errors import FolderInUse
from decentral.peer.occupying import occupied
from tests.peer.test_join import LOOPBACK, Problem, run_terms

HOLDER = """
import os, sys
from pathlib import Path
from decentral.peer.occupying import occupied
with occupied(Path(sys.argv[1])):
    child = os.fork() if sys.argv[2] == "forks" else 1
    if child:
        print(child, flush=True)
    sys.stdin.read()
"""

ASKER = """
import sys
from pathlib import Path
from decentral.peer.occupying import occupied
with occupied(Path(sys.argv[1])):
    pass
"""


@contextmanager
def held_elsewhere(folder: Path, how: str = "alone") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that has the folder, and a child of it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder), how], **pipes) as holder:
        child = int(holder.stdout.readline())
        try:
            yield holder, child
        finally:
            holder.kill()


def test_a_peer_that_begins_where_another_has_not_said_a_word_yet_is_refused_and_touches_nothing(tmp_path):
    problem = Problem(0)
    with held_elsewhere(tmp_path):
        second = join_here(tmp_path, problem)
        with pytest.raises(decentral.ConfigError, match="a peer begins here just now; choose another --out"), second:
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    with join_here(tmp_path, problem) as peer:
        assert peer.round == 0


def join_here(folder: Path, problem: Problem) -> decentral.Peer:
    return decentral.join(
        run_terms("sparseloco"), problem.model, problem.optimizer, out=folder, listen=LOOPBACK, transport="native"
    )


def test_a_folder_whose_peer_was_killed_is_free_though_a_child_of_it_lives(tmp_path):
    with held_elsewhere(tmp_path, "forks") as (holder, child):
        with pytest.raises(FolderInUse), occupied(tmp_path):
            pass
        holder.kill()
        holder.wait()
        try:
            os.kill(child, 0)
            with occupied(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_one_process_may_have_it_twice_and_gives_it_back_with_the_second(tmp_path):
    with occupied(tmp_path):
        with occupied(tmp_path):
            pass
        refused = subprocess.run([sys.executable, "-c", ASKER, tmp_path], capture_output=True, text=True)
    assert "FolderInUse" in refused.stderr
    assert subprocess.run([sys.executable, "-c", ASKER, tmp_path]).returncode == 0
