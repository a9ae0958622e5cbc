"""Completes the JSON vectors of spec/vectors, and checks them: `python -m conformance.assurance.vector_writer`.

The files are the only source of inputs. A new test is a **draft** in its group: `tcId`, `comment`, `flags` and
`inputs`, where floats may be decimal numbers; `items`, if it covers others than its operation does; `refused`, the
argument that an error must name; `exact`, the results of a bounded operation that are exact on these inputs; `bits` of
the grid of long results. `--write` adds what the brute-force oracles in plain Python give, never the reference, and
three tests for each method that has none. A published test never changes: `--write` refuses it.
"""
