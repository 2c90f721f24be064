"""What a run is expected to do on equal machines, by arithmetic alone, and the terms that follow from it."""
