"""Cache from which tokens can be evicted, in memory and in files."""
