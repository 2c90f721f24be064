"""Outer methods that reach into a peer: its inner optimizer, its gradients, or what of a model it trains."""
