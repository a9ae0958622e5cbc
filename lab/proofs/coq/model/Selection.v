(* Top-k selection with its tie rule. spec/policies.md, PO-TOP-UNITS; the stage best_tokens has units of one token. *)
From Kvspec Require Export Lists.

Record unit_of {R : Type} := {
  first : Z;             (* its first position *)
  width : Z;             (* how many tokens it holds *)
  value : option R;      (* its score, or none *)
  pinned : bool
}.
Arguments unit_of : clear implicits.

Section Selecting.
  Context {R : Type} `{Number R}.

  (* A unit without a score comes last. *)
  Definition higher (x y : option R) : bool :=
    match x, y with
    | Some x, Some y => ltb y x
    | Some _, None => true
    | None, _ => false
    end.

  (* The higher score first, then the lower unit. *)
  Definition preferred : unit_of R -> unit_of R -> bool := ties_by_place (fun u v => higher (value u) (value v)) first.

  (* From the best down, as long as all so far fit. *)
  Fixpoint while_they_fit (room : Z) (order : list (unit_of R)) : list (unit_of R) :=
    match order with
    | [] => []
    | u :: rest => if width u <=? room then u :: while_they_fit (room - width u) rest else []
    end.

  Definition top_units (B : Z) (units : list (unit_of R)) : list (unit_of R) :=
    let safe := filter pinned units in
    let others := sort preferred (filter (fun u => negb (pinned u)) units) in
    sort (fun u v => first u <=? first v) (safe ++ while_they_fit (B - sum (map width safe)) others).

  Definition selected (B : Z) (units : list (unit_of R)) : list Z :=
    flat_map (fun u => range (first u) (first u + width u)) (top_units B units).
End Selecting.
