"""The decode study: facts in a prompt and in a long stream, asked for late, under each part of Section 3.8."""
