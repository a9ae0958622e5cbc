(* The model as OCaml. Z becomes zarith's integers, which have no largest; nat, which is only ever the length of a list
   or of a text, becomes OCaml's. *)
From Coq Require Import Extraction ExtrOcamlBasic ExtrOcamlNatInt ExtrOcamlZBigInt ExtrOcamlNativeString.
From Kvspec Require Import Trunks Dissolution Budgets Blocks Score Diversity.

Extract Inlined Constant Z.leb => "Big_int_Z.le_big_int".
Extract Inlined Constant Z.ltb => "Big_int_Z.lt_big_int".
Extraction "model.ml" rational sum offsets pieces range sentences last5 first5 stored_edges interface_edges merges
  Trunks.split trunks trunk_impact protected cut allocate keep_count stays kept ratio weakened parse tokens effective
  whole_shares pyramid top_units selected best_blocks best_path scores dot diverse.
