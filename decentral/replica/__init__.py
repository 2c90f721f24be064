"""The state that every peer holds alike, and what a commit makes of it. Tensors and bytes, no network."""
