"""What tests are drawn from, under the specification's nouns; own/conformance/test_reach.py shows what each reaches."""
