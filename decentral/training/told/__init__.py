"""What the training side tells of a peer: what it counts of itself, and what rounds say of the swarm."""
