"""A study as a file: what is compared, which runs that takes, and who makes them, however often that ends."""
