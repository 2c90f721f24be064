"""What commands show while they work, and as numbers for monitors."""
