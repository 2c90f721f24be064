"""A peer or a relay that the system starts by itself: what it is told, for each kind of system."""
