"""The vectors of items: the reference's function for each, and what it gives inside the item's bound."""
