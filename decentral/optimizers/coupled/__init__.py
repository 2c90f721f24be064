"""Outer methods that reach into a peer's training: its inner optimizer, its gradients, or what of a model it trains."""
