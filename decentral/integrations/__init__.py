"""A peer of a run inside somebody else's training loop; each module is imported by whoever uses that framework."""
