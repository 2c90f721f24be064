"""What gathered frames hold, and what a record makes of it."""
