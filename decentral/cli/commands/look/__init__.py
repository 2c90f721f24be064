"""Commands that show how a peer, its swarm or its runs are, and change nothing."""
