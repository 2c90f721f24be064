"""One cell of a study: what decides its numbers, and the run that makes them."""
