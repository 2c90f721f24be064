"""The outer loop beside any inner loop: when a peer contributes, waits and merges."""
