"""``requests/``: how a command steers the peer that runs in a directory, without a socket.

A command drops an empty file ``requests/leave``, ``requests/pause`` or ``requests/resume``; the peer takes
it away when it acts. Files of a directory belong to whoever may write there, so no other right is needed.
"""

from pathlib import Path

from decentral.errors import DiskError, UsageError

REQUESTS = ("leave", "pause", "resume")
_FOLDER = "requests"


def ask(directory: Path, request: str) -> None:
    """Leave a request for the peer in ``directory``."""
    if request not in REQUESTS:
        raise UsageError(f"request {request!r}: unknown; one of {', '.join(REQUESTS)}")
    try:
        folder = directory / _FOLDER
        folder.mkdir(exist_ok=True)
        (folder / request).touch()
    except OSError as error:
        raise DiskError(
            f"{directory}: the request cannot be left ({error.strerror}); use the peer's own account"
        ) from error


def take_requests(directory: Path) -> tuple[str, ...]:
    """Take and return the requests that wait, ``leave`` first."""
    taken = []
    for request in REQUESTS:
        try:
            (directory / _FOLDER / request).unlink()
        except OSError:
            continue
        taken.append(request)
    return tuple(taken)


def drop_requests(directory: Path) -> None:
    """Forget what was asked of an earlier process."""
    take_requests(directory)
