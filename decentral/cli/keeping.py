"""What a relay keeps of runs: a follower of each, for those who come when all peers have gone.

Each is ``decentral follow`` in a process of its own: the relay stays as small as it is, and a model that is too large,
or a peer that sends rubbish, ends a follower and not the relay.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import click

from decentral.errors import UsageError
from decentral.swarm.invite import Invite
from decentral.transport.daemon.process import tethered

MOST = 4  # runs: each holds a model and its outer state in memory
EVERY = 10  # rounds between two anchors that are written
_LEAVE_SECONDS = 10.0  # what a follower needs to keep its state
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 600.0  # s until a follower that failed is started again
_IN_VAIN = (2, 10, 11, 12, 21, 50)  # exit codes after which it would fail again


@dataclass(frozen=True, slots=True)
class Keeping:
    """The runs that are kept, and where."""

    invites: tuple[str, ...]
    folder: Path  # each run has its own in there
    disk: int  # bytes that each may take

    def check(self) -> None:
        """UsageError for too many, or one twice; InviteError."""
        runs = [Invite.parse(invite).run for invite in self.invites]
        if len(runs) > MOST:
            raise UsageError(
                f"--keep: {len(runs)} runs, a relay keeps {MOST} at most; start another relay for the rest"
            )
        if len(set(runs)) < len(runs):
            raise UsageError("--keep: two invites are of the same run; one will do")

    def command(self, number: int, listen: Sequence[str], relay: str) -> list[str]:
        """How the follower of one run is started; ``relay`` is the relay's own address."""
        invite = self.invites[number]
        where = [part for address in listen for part in ("--listen", beside(address, number))]
        out = self.folder / Invite.parse(invite).run.hex()[:8]
        kept = ["--every", str(EVERY), "--keep", "1", "--keep-serving", "--max-disk", f"{self.disk / 1e6:.6f}MB"]
        ways = ["--relay", relay, "--transport", "native", "--no-lan", *where]
        return [sys.executable, "-m", "decentral", "follow", invite, "--out", str(out), *kept, *ways]


def beside(address: str, number: int) -> str:
    """Where the follower of run ``number`` listens: a port after the relay's, so that its invites stay true."""
    head, _, port = address.rpartition("/tcp/")
    if not port.isdecimal():
        return address
    return f"{head}/tcp/{int(port) + 1 + number if int(port) else 0}"


async def keep(keeping: Keeping, listen: Sequence[str], relay: str) -> None:
    """Follow all of them until cancelled."""
    async with anyio.create_task_group() as group:
        for number in range(len(keeping.invites)):
            group.start_soon(_follow, keeping.command(number, listen, relay))


async def _follow(command: Sequence[str]) -> None:
    pause, run = _FIRST_PAUSE, Invite.parse(command[4]).run.hex()[:8]
    while (code := await _run(command)) not in _IN_VAIN:
        click.echo(f"the follower of run {run} ended (code {code}); again in {pause:.0f} s", err=True)
        await anyio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    click.echo(f"run {run} is not kept (code {code}): see the line above", err=True)


async def _run(command: Sequence[str]) -> int:
    """Its exit code. What it says on stderr goes to the relay's; it ends with the relay, and keeps its state."""
    process = await anyio.open_process(
        tethered(command) if sys.platform == "linux" else command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None,
        start_new_session=True,  # Ctrl-C reaches the relay alone, which then ends it
    )
    try:
        return await process.wait()
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _end(process: anyio.abc.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    with anyio.move_on_after(_LEAVE_SECONDS):
        await process.wait()
        return
    process.kill()
    await process.wait()
