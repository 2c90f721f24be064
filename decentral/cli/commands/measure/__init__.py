"""Commands that measure: this machine, simulated swarms, methods side by side."""
