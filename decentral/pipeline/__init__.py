"""A replica of several machines: its layers are cut into stages, and hidden states cross between them."""
