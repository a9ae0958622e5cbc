"""Writer of the JSON vectors in spec/vectors, which also checks them: `python -m lab.vector_writer`.

The files are the only source of inputs. A new test is a **draft** in its group, with these members:

- `tcId`, `comment` and `flags`;
- `inputs`, in which floats may be decimal numbers;
- `items`, if the test covers items other than those of its operation;
- `refused`, the argument that an error must name;
- `exact`, the results of a bounded operation that are exact on these inputs;
- `bits`, the grid of long results.

`--write` adds the results of the brute-force oracles in plain Python, never those of the reference. It also adds three
tests for each policy without tests. A published test never changes, so `--write` fails if one has changed.
"""
