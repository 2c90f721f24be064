"""A relay that runs until it is stopped, and the numbers that it tells."""
