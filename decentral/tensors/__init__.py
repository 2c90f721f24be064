"""Loops over tensors that compressors, coding and optimizers stand on."""
