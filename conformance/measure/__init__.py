"""What is measured and not judged. Not collected with the suite."""
