"""One aggregation rule per file, with its equation and its source; found by themselves."""
