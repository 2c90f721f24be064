"""What a running peer shows on a screen, in a live view or in plain lines."""
