"""Ready-made jobs: what ``demo`` and ``join`` train when nobody brings a script.

``corpus`` bytes from disk, a shuffled order, a tokenizer for bytes · ``batches`` which bytes a peer sees at a step, and
its part of a data set · ``sizing`` the shape of the built-in model, its config.json, the demo's numbers ·
``language_model`` a small Llama over bytes, or a mixture of experts · ``trained_model`` such a model opened again ·
``evaluate`` bits per byte, what a model says next, and what ``--data`` names. Import from these modules: this one stays
empty, so that nobody loads more than he uses.
"""
