"""How contributions become one vector."""
