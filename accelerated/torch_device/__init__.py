"""Stages and scores in plain torch, on any device that torch has."""
