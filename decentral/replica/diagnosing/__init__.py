"""What contributions that a peer has anyway tell of its swarm, in a few numbers. Pure, and never a second decode."""
