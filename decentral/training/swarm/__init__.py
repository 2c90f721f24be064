"""Where a training loop meets the swarm: the loop of sockets on a thread of its own, or one that both share."""
