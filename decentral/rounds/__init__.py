"""The half of a round with I/O: carries out what the machine decides; catching up, gossip."""
