"""A direct connection between two peers behind NATs: DCUtR."""
