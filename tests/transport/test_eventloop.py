"""Peers run on uvloop where it is installed, and on asyncio's own loop where it is not."""

import asyncio
import sys

import pytest

from decentral.transport import eventloop


async def kind_of_loop(suffix: str) -> str:
    return type(asyncio.get_running_loop()).__module__ + suffix


@pytest.mark.skipif(sys.platform == "win32", reason="there is no uvloop for Windows")
def test_a_peer_runs_on_uvloop_where_it_is_installed() -> None:
    assert eventloop.run(kind_of_loop, "!") == "uvloop!"


def test_without_uvloop_it_runs_on_the_loop_that_python_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decentral.transport.eventloop.find_spec", lambda name: None)
    assert eventloop.run(kind_of_loop, "!").startswith("asyncio.")


def test_what_the_work_raises_is_raised() -> None:
    async def fails() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        eventloop.run(fails)
