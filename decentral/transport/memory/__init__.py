"""A network inside one event loop."""
