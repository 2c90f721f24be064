"""``decentral demo``: peers as real processes on this machine."""
