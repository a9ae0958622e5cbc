(* The model's numbers as the kernel's own binary64, for the vectors; with short names for their inputs. *)
From Coq Require Export Floats Uint63 String.
From Kvspec Require Export Trunks Dissolution Budgets Blocks Score Diversity.

#[global] Instance binary64 : Number float := {
  zero := 0%float; plus := PrimFloat.add; minus := PrimFloat.sub; times := PrimFloat.mul; over := PrimFloat.div;
  of_Z z := PrimFloat.of_uint63 (Uint63.of_Z z); ltb := PrimFloat.ltb
}.

Definition T (start : Z) (members : list float) (score strength : float) (safe : bool) : trunk float :=
  {| start := start; members := members; score := score; strength := strength; safe := safe |}.

Definition U (first : Z) (value : option float) (pinned : bool) : unit_of float :=
  {| first := first; width := 1; value := value; pinned := pinned |}.

(* The neighbours of a position, from rows that begin at start. *)
Definition row {A} (start : Z) (rows : list (list A)) (position : Z) : list A :=
  if position <? start then [] else nth (Z.to_nat (position - start)) rows [].

Definition shares_of (sizes stays : list Z) : list float :=
  map (fun '(s, k) => over (of_Z k) (of_Z s)) (combine sizes stays).

Definition dissolved (N_min B : Z) (all : list (trunk float)) : list Z * list float * list float :=
  let decided := stays N_min B all in
  (kept N_min B all, map (fun '(g, k) => ratio g k) decided, map (fun '(g, k) => weakened g k) decided).
