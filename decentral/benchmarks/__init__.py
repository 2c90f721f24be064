"""Figures that people compare: what compressors cost in bytes, in time and in error, beside what others ship."""
