"""The peers that are here: this one's identity, invites, and the directory of leases."""
