"""What the replicas of a laboratory learn."""

from decentral.lab.work.base import OneByOne, Trained, Work

__all__ = ["OneByOne", "Trained", "Work"]
