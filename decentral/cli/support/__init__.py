"""What a person sends along with a question: how a peer is and was, without what is secret or private."""
