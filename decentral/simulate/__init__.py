"""What a swarm would do and cost, without one."""
