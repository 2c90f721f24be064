"""Streams of bytes to a peer id: by the go-libp2p daemon, by sockets of our own, by py-libp2p, or in memory."""

from decentral.transport.base import Count, Handler, Stream, Traffic, Transport

__all__ = ["Count", "Handler", "Stream", "Traffic", "Transport"]
