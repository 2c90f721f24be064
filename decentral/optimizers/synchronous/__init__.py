"""Outer methods whose rounds average what all present peers bring."""
