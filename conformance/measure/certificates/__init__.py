"""What others are found to do: defects to report (`upstream`), and certificates."""
