"""Rounds of pairs: each step two peers swap frames, or one goes alone."""
