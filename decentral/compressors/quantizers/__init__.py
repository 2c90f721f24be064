"""With how many bits a value is sent: one quantiser per file."""
