"""`kvspec explain`: what CrystalCache keeps of a prompt, and why, as one page that computes it again."""
