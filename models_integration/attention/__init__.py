"""The model's attention, observed and masked by position."""
