"""A transport on py-libp2p's host, hardened. It needs the extra libp2p: nothing imports it that did not choose it."""
