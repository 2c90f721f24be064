"""Does a peer that comes back still speak the others' version? A newcomer learns it before it fetches anything.

Who resumes asks nobody for the run's terms, because it has them: after an upgrade it would train on beside a swarm that
drops its frames. So it asks those that are here, a few bytes each. One that lies cannot send it away: it goes only when
nobody who answered speaks its version.
"""

from __future__ import annotations

import anyio

from decentral.errors import DecentralError, VersionError
from decentral.swarm.admission import Admission
from decentral.swarm.directory import Directory
from decentral.swarm.hello import ask_hello

_ASKED = 3  # peers
_AGAIN = 2.0  # s between two looks for somebody who answers


async def check_version(directory: Directory, admission: Admission | None) -> None:
    """Return once somebody speaks this version. Raises VersionError when all who answer speak others."""
    while True:
        refused = None
        for peer in list(directory.live())[:_ASKED]:
            try:
                await ask_hello(directory.transport, peer, admission)
                return
            except VersionError as error:
                refused = error
            except DecentralError:
                continue  # it is busy, or gone, or breaks a rule: another one is asked
        if refused is not None:
            raise refused
        await anyio.sleep(_AGAIN)
