"""hivemind's DHT: how peers that share no bootstrap peer hear of each other."""
