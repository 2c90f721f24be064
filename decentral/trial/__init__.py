"""Replicas of a run in one process, without a network: for the trial of terms before a run is founded, and for studies.

All but the network is as shipped: codec, method, schedule, inner optimizers.
"""
