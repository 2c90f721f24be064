"""``decentral relay`` on a public host of the lab, as a person would run it; killed and started again at will."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.natlab.lab import Host
from tests.natlab.namespaces import LabError

PORT = 4001


class RelaySeat:
    """A relay and the line that peers are given."""

    def __init__(self, host: Host, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._host, self._key, self._log = host, folder / "relay.key", folder / "log.txt"
        self._process: subprocess.Popen[str] | None = None
        self.number = host.number
        self.address = ""

    def start(self) -> None:
        """Run it until ``kill``; its address is known when this returns. Starting a running one does nothing."""
        if self._process is not None:
            return
        listen = f"/ip4/{self._host.v4}/tcp/{PORT}"
        words = ("-m", "decentral", "relay", "--listen", listen, "--identity", str(self._key))
        with self._log.open("a") as log:
            self._process = self._host.start(sys.executable, *words, stdout=subprocess.PIPE, stderr=log)
        assert self._process.stdout is not None, "a pipe"
        said = self._process.stdout.readline().split()
        if said[:1] != ["--relay"]:
            raise LabError(f"decentral relay said {said} and no address; see {self._log}")
        self.address = said[1]

    def kill(self) -> None:
        """SIGKILL; killing a dead one does nothing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None, "a pipe"
            self._process.stdout.close()
            self._process = None
