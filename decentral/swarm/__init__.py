"""Who is here: this peer's identity, invites, and the directory of leases."""
