"""Feedback mechanisms by their spelling: ``ef(beta=0.95)`` and back. ``str(feedback)`` is canonical.

Other packages add mechanisms through the entry point group "decentral.feedback".
"""

from types import MappingProxyType

from decentral.compressors.feedback.base import Feedback
from decentral.compressors.feedback.dgc import DGC
from decentral.compressors.feedback.econtrol import EControl
from decentral.compressors.feedback.ef import ErrorFeedback
from decentral.compressors.feedback.ef21 import EF21
from decentral.compressors.feedback.none import NoFeedback
from decentral.errors import ConfigError
from decentral.plugins import Plugins
from decentral.spelling import make

__all__ = ["describe_feedback", "parse_feedback"]

_OURS = (NoFeedback, ErrorFeedback, EF21, EControl, DGC)
_METHODS = Plugins("feedback", "decentral.feedback", MappingProxyType({m.name: m for m in _OURS}))
_LONGEST_SPELLING = 256


def parse_feedback(spelling: str) -> Feedback:
    """The mechanism of a spelling; ConfigError, with the nearest name, when there is none."""
    if len(spelling) > _LONGEST_SPELLING:
        raise ConfigError(f"feedback of {len(spelling)} characters: at most {_LONGEST_SPELLING} are read")
    made: Feedback = make(spelling, _METHODS, "ef(beta=0.95)")
    return made


def describe_feedback() -> list[dict[str, object]]:
    """One row per mechanism: name, spelling with defaults, what is kept on each side (layout), source."""
    rows: list[dict[str, object]] = []
    for name in _METHODS.names():
        made: Feedback = _METHODS.make(name, {})
        source = getattr(getattr(made, "about", None), "source", "not described")
        rows.append(
            {
                "name": name,
                "spelling": str(made),
                "sender keeps": ", ".join(made.sender) or "nothing",
                "receivers keep": ", ".join(f"{name} of each sender" for name in made.receiver) or "nothing",
                "source": source,
            }
        )
    return rows
