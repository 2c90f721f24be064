"""The laboratory: methods side by side on many replicas in one process, by the real codecs, methods and schedules."""
