"""Streams of bytes to a peer id: over the go-libp2p daemon, or simulated in memory."""

from decentral.transport.base import Count, Handler, Stream, Traffic, Transport

__all__ = ["Count", "Handler", "Stream", "Traffic", "Transport"]
