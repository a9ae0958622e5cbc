"""The JSON vectors of spec/vectors as the suite reads them, and what is run on each.

`*_subject` run the judged code. `nestedkv_oracles` and `brute_force` are plain Python that published vectors name as
what confirmed them; they stand where those names say.
"""
