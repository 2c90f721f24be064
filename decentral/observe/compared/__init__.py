"""Runs side by side, from what their peers left behind."""
