"""Simulated swarms: real nodes in virtual time under seeded faults, disks that lose what was not synced, and a model of
cost for sizes that no machine can run.
"""
