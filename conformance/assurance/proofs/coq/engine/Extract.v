(* The model as OCaml. Z and nat become OCaml's integers of 63 bits: the engine holds B to the largest of them. *)
From Coq Require Import Extraction ExtrOcamlBasic ExtrOcamlNatInt ExtrOcamlZInt ExtrOcamlNativeString.
From Kvspec Require Import Trunks Dissolution Budgets Blocks Score Diversity.

Extract Inlined Constant Z.leb => "(<=)".
Extract Inlined Constant Z.ltb => "(<)".
Extract Inlined Constant Z.eqb => "(=)".
Extraction "model.ml" rational offsets pieces range stored_edges trunks trunk_impact stays kept ratio weakened
  parse tokens effective whole_shares pyramid top_units selected best_blocks scores dot diverse.
