"""Whichever of these tests is the first to import libp2p: its definitions are kept apart from hivemind's."""

from decentral.transport import pylibp2p  # noqa: F401
