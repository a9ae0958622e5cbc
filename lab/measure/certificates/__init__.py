"""Certificates of other libraries."""
