"""An invite by four words and a number that can be said over a telephone: the code, the handshake, who finds whom."""
