"""The protocols of libp2p, byte by byte. No sockets."""
