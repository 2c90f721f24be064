"""Bytes on their way to other peers, and who sends which to whom: gather, reduce, pair."""
