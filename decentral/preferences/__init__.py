"""When a volunteer's machine may train, and how much of it: hours, battery, idleness, memory, threads.

``preferences`` is pure; ``controls`` looks at the computer, and keeps what was set. Nothing here knows of rounds or
peers.
"""

from decentral.preferences.preferences import SETTINGS, Hours, Preferences, reasons_to_wait, with_setting

__all__ = ["SETTINGS", "Hours", "Preferences", "reasons_to_wait", "with_setting"]
