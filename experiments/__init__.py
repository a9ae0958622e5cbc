"""Tasks with known answers, and the studies that compare policies on them."""
