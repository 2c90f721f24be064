"""Figures of a swarm held to their bands: what is usual, what is said when one leaves it, when it is back."""
