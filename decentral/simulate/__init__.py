"""The real code in a world that can be wound back: disks that lose what was never synced.

``durability`` what a power cut may leave · ``disk`` a real folder that records and crashes
"""
