"""Bytes of peers: keys and signatures, frames, control messages. Hostile until checked; no sockets here."""
