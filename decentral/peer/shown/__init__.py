"""How a peer shows itself: events, its status, the folder and the screen, trackers of experiments."""
