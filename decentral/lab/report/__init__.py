"""What a study found: statistics, verdicts, tables and figures, all made again from its cells each time."""
