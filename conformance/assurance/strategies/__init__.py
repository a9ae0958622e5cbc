"""Every policy with its brute-force answer, at the end of a prompt, in decode and in turns."""
