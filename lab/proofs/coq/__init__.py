"""Coq model of the method's integer core: theorems about the model, and its extraction as an engine.

`python -m lab.proofs.coq` compiles the model. It checks that theorems rest only on the axioms that
README.md names. With `planted`, it checks that planted errors are detected. `engine.py` uses the protocol of engines.
"""
