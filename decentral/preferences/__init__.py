"""When a volunteer's machine may train, and how much of it: hours, battery, idleness, memory, threads.

Pure but for ``computer.py``, which looks at the computer. Nothing here knows of rounds or peers.
"""

from decentral.preferences.preferences import SETTINGS, Hours, Preferences, changed, reasons_to_wait

__all__ = ["SETTINGS", "Hours", "Preferences", "changed", "reasons_to_wait"]
