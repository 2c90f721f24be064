"""Who sends which bytes to whom: gather, reduce, pair."""
