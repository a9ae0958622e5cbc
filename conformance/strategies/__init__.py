"""What tests are drawn from, under the specification's nouns. `meta/test_reach.py` shows what each one reaches."""
