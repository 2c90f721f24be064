"""One simulated machine: its disk, its links, its clock, its process."""
