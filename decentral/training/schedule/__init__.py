"""When a peer contributes, waits and merges, and how much of what it learnt counts: without a swarm."""
