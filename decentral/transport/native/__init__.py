"""Streams over TCP, Noise and yamux in this process."""
