"""What a swarm of any size sends: arithmetic over the sizes of real messages. No tensors, no event loop, no peers.

Costs are what a peer sends on average over the peers of a swarm in which nothing fails; as much is received.
``tests/simulate/test_cost_model.py`` holds them against what real peers sent.
"""
