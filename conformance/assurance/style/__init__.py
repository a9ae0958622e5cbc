"""Rules for the sentences that users read: `python -m conformance.assurance.style`."""
