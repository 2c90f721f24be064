"""The tests' side of the zygote: processes that are started, asked, killed and waited for as subprocess has it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, TextIO

PAUSE = 0.02  # s between two looks at whether a process has ended


class Fork:
    """A running program of the zygote, with the part of Popen's interface that the tests use."""

    def __init__(self, forks: Forks, program: str, arguments: Sequence[str]) -> None:
        theirs, ours = zip(*(self._pipe(number) for number in range(3)), strict=True)
        self._forks, self.returncode = forks, None
        self.stdin: TextIO = os.fdopen(ours[0], "w")
        self.stdout: TextIO = os.fdopen(ours[1])
        self.stderr: TextIO = os.fdopen(ours[2])
        try:
            self.pid: int = forks.ask({"program": program, "arguments": list(arguments)}, theirs)
        finally:
            for end in theirs:
                os.close(end)

    @staticmethod
    def _pipe(number: int) -> tuple[int, int]:
        reader, writer = os.pipe()
        return (reader, writer) if number == 0 else (writer, reader)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.ask({"ended": self.pid})
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        end, nobody = time.monotonic() + timeout, threading.Event()
        while self.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError(f"process {self.pid} still runs after {timeout:g} s")
            nobody.wait(PAUSE)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Forks:
    """Owns the zygote."""

    def __init__(self) -> None:
        threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        self._orders, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tests.faults.zygote"]
            self._zygote = subprocess.Popen(command, stdin=theirs, env={**os.environ, **threads})

    def start(self, program: str, *arguments: object) -> Fork:
        return Fork(self, program, [str(argument) for argument in arguments])

    def ask(self, order: dict[str, Any], pipes: Sequence[int] = ()) -> Any:
        socket.send_fds(self._orders, [json.dumps(order).encode()], pipes)
        answer = b""
        while not answer.endswith(b"\n"):
            more = self._orders.recv(1 << 16)
            assert more, f"the zygote ended with {self._zygote.wait()}"
            answer += more
        return json.loads(answer)

    def end(self) -> None:
        self._orders.close()
        assert self._zygote.wait() == 0
