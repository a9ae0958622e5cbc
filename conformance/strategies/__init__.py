"""What tests are drawn from, under the specification's nouns. `conformance/own/conformance/test_reach.py` shows what each one reaches."""
