"""What answers from archived chunks of conversations, and how that differs from their text."""
