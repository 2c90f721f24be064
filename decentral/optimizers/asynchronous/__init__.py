"""Outer methods whose rounds go on without the slow, and take what comes late."""
