"""A policy at work on a model: observe, decide, compact, go on."""
