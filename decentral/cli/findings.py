"""What a check found: one line for a person, one object for a program."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    verdict: str  # ok, warn, fail
    what: str
    detail: str
