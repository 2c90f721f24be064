"""Starts peers as forks of one process that has imported and compiled everything: 4 s of CPU less for each.

    python -m tests.faults.zygote      orders on the socket that is its stdin, one JSON object at a time

A fork is a process of its own that dies by real signals. Forking is safe because this process has started no event loop
and has one thread, which is checked.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence

import hivemind  # noqa: F401 - imported here so that no fork has to
import torch

from decentral.compressors import parse_compressor, parse_feedback
from decentral.manifest import preset_manifest
from decentral.replica.codec import Codec
from tests.faults import stage, trainer, worker

PROGRAMS: dict[str, Callable[[Sequence[str]], None]] = {
    "stage": stage.run,
    "trainer": trainer.run,
    "worker": worker.run,
}
NUM_PIPES = 3  # a fork's stdin, stdout, stderr


def prepare() -> None:
    """Load the machine code of the codecs."""
    torch.set_num_threads(1)
    for preset in ("sparseloco", "diloco"):
        terms = preset_manifest(preset).compressor
        Codec(parse_compressor(terms.chain), parse_feedback(terms.feedback)).warm_up()


def num_threads() -> int:
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1


def start(program: str, arguments: Sequence[str], pipes: Sequence[int], orders: socket.socket) -> int:
    """Fork; returns the process id, in the parent only."""
    assert num_threads() == 1, "a fork of several threads may inherit locked locks"
    if child := os.fork():
        return child
    code = 1
    try:
        orders.close()
        for number, pipe in enumerate(pipes):
            os.dup2(pipe, number)
            os.close(pipe)
        PROGRAMS[program](arguments)
        code = 0
    except BaseException:  # noqa: BLE001 - it must not go on in the zygote's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(pid: int) -> int | None:
    """The exit code, negative for a signal; None while it runs. A process is asked about until it has ended."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def main() -> None:
    prepare()
    gc.collect()
    gc.freeze()  # a fork's collector must not touch, and so copy, what all of them share
    orders, running = socket.socket(fileno=os.dup(0)), set[int]()
    while True:
        data, pipes, _, _ = socket.recv_fds(orders, 1 << 16, NUM_PIPES)
        if not data:
            break
        order = json.loads(data)
        if "ended" in order:
            answer = ended(order["ended"])
            running -= {order["ended"]} if answer is not None else set()
        else:
            answer = start(order["program"], order["arguments"], pipes, orders)
            running.add(answer)
            for pipe in pipes:
                os.close(pipe)
        orders.sendall(json.dumps(answer).encode() + b"\n")
    for pid in running:  # whoever gave the orders is gone
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
