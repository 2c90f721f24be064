"""What outlives a peer's process, or its disk: checkpoints, and a state that other members keep."""
