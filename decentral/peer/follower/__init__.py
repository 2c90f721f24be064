"""follow(): a run from outside, anchor by anchor."""
