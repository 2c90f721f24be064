"""How a peer gets to the head of the chain, and how it helps others to get there."""
