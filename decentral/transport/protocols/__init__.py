"""What libp2p peers say to each other, byte by byte. No sockets."""
