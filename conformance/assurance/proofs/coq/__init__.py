"""The integer core of the method as a model in Coq: theorems about it, and its extraction as an engine.

`python -m conformance.assurance.proofs.coq` compiles it all and checks that no theorem rests on an axiom beyond those
that README.md names; `planted` shows that errors are found; `engine.py` speaks the protocol of engines.
"""
