"""The methods that users call, by class and by name."""
