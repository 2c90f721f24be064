"""Which entries are sent: one sparsifier per file."""
