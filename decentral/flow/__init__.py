"""Rates: when bytes may leave, how many may be under way, how fast a line is."""
