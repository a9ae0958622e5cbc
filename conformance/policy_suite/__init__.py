"""Tests of the properties that a policy promises, which are the columns of the table in spec/policies.md.

    python -m pytest -p conformance.plugin --pyargs conformance.policy_suite --kvspec-policy module:ATTRIBUTE
"""
