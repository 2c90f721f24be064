"""A transport on py-libp2p's host, hardened. It needs the extra libp2p: nothing imports it that did not choose it."""

from decentral.transport.pylibp2p.apart import keep_apart

keep_apart()  # before any module of this folder imports libp2p
