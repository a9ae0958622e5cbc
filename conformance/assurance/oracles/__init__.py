"""What injection and statistics must give, in plain Python."""
