"""The processes of one peer: the main one talks to the swarm, and the others do what it says at every boundary."""
