"""State that a peer keeps: checkpoints on its own disk, the log of commits, snapshots, the exported model.

``durable`` the fsync protocol · ``tensor_file`` safetensors with a hash per tensor · ``checkpoint`` save and load the
newest valid one, torch's state as tensors and JSON · ``journal`` the log of commits · ``snapshot`` hands the anchor to
a joiner, in chunks, and puts it together there · ``delta`` the exact difference of two versions, and anchors as
files · ``export`` a model folder, also packed for the way. No pickle anywhere.
"""
