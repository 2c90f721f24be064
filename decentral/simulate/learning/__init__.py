"""What simulated peers train, and when."""
