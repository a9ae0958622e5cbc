"""Float bounds of `conformance.tolerances`, proved by Gappa. Ball arithmetic searches for their largest errors."""
