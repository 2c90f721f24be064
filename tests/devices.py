"""Where laws about tensors are tried: the processor, and a GPU wherever one is at hand."""

import torch

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
