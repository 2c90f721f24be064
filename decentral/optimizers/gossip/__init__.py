"""Outer methods of pairs: each peer has a replica of its own."""
