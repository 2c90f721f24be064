"""What one peer does in a round: objects that act on its `RoundState`, each for one part of the protocol."""
