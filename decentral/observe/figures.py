"""Whether figures can be drawn here. Their library is an extra: it takes 96 MB, and a peer draws nothing."""

from __future__ import annotations

import importlib.util

NO_FIGURE = "no figure was drawn: that takes matplotlib; pip install 'decentral[figures]'"


def can_draw() -> bool:
    """Whether matplotlib is installed; it is not loaded by this."""
    return importlib.util.find_spec("matplotlib") is not None
