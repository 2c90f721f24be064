"""A swarm without a network: real contributions, frames, records and outer steps, in virtual time."""

from decentral.lab.swarm.course import Course, Reached
from decentral.lab.swarm.lab_peer import LabPeer, lab_peers
from decentral.lab.swarm.world import LabWorld

__all__ = ["Course", "LabPeer", "LabWorld", "Reached", "lab_peers"]
