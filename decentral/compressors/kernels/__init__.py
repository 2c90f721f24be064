"""The loops and tables that compressors share."""
