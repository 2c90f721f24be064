"""What a peer alone has, kept in the memory of other peers: sealed, in pieces of which a few are enough."""
