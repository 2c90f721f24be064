"""Outer methods that send derivatives along random directions: a byte for each, whatever the model's size."""
