"""A forecast round by round: when frames and votes are where they must be, by arithmetic, and no message in between."""
