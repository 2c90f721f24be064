"""One peer's swarm side, put together. No thread, no torch.nn."""
