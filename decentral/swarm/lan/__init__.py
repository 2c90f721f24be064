"""Peers of one run find each other on the local network."""
