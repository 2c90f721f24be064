"""Circuit relay v2: keep a place at a relay, dial through one, be one."""
