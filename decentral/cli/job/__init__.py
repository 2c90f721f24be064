"""The training job behind ``start`` and ``join``."""
