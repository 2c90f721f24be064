"""What a peer keeps: checkpoints on its own disk, the log of commits, snapshots, the exported model.

``durable`` the fsync protocol · ``tensor_file`` safetensors with a hash per tensor · ``checkpoint`` save
and load the newest valid one · ``optimizer_state`` torch state as tensors and JSON · ``journal`` the log of
commits · ``snapshot`` and ``assembler`` hand the anchor to a joiner, in chunks as ``chunk_form`` says ·
``packed_file`` a file packed so · ``delta`` the exact difference of two versions · ``export`` a model
folder. No pickle anywhere.
"""
