"""The pure half of a round: what the chain says, who may vote, what a ballot decides. No I/O, no clock, no tensors."""
