"""Ready-made jobs: what ``demo`` and ``join`` train when nobody brings a script.

``corpus`` bytes from disk · ``batches`` which bytes a peer sees at a step · ``language_model`` a small
Llama over bytes · ``mixture`` its experts · ``schedule`` the inner learning rate · ``evaluate`` bits per
byte · ``presets`` the demo's numbers, no torch. Import from these modules: this one stays empty, so that
reading the presets does not load torch.
"""
