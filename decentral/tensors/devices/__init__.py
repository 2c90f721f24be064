"""What is done on a device other than the processor, and the way there and back."""
