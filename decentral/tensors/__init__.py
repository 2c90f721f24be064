"""Tensors in memory and on devices, and the loops over them that compressors, coding and optimizers stand on."""
