"""Streams over the go-libp2p daemon that comes with hivemind."""
