"""State that a peer alone has, kept in the memory of others: sealed, in pieces of which a few are enough."""
