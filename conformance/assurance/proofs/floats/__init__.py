"""Float bounds of `conformance.tolerances`: proved by Gappa, and searched for their worst case by ball arithmetic."""
