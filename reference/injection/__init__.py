"""Arithmetic of cross-session injection of archived chunks, independent of the serving engine.

Sections, tables and appendices are those of "Boundary-Conditioned Structural Alignment for Cross-Session KV Cache
Injection", which is the paper in this package.
"""
