"""The swarm side of one peer, put together. No thread, no torch.nn."""
