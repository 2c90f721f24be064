"""The documentation site: what is generated for it, and how links out of ``docs/`` lead somewhere (``make docs``)."""
