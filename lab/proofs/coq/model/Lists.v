(* What the other files share: numbers, sums, places in lists, and a stable sort.

   Tokens, sizes and positions are integers (Z). Scores and weights are of any type R that has the operations of
   Number: exact rationals in proofs, binary64 in the kernel (vectors) and in the extracted engine. *)
From Coq Require Export ZArith List Bool QArith.
Export ListNotations.
Global Open Scope Z_scope.
Global Open Scope bool_scope.

Class Number (R : Type) := {
  zero : R;
  plus : R -> R -> R;
  minus : R -> R -> R;
  times : R -> R -> R;
  over : R -> R -> R;
  of_Z : Z -> R;
  ltb : R -> R -> bool
}.

#[global] Instance rational : Number Q := {
  zero := 0%Q; plus := Qplus; minus := Qminus; times := Qmult; over := Qdiv; of_Z := inject_Z;
  ltb x y := negb (Qle_bool y x)
}.

(* Conventions, "Sums": left to right, starting from 0. *)
Definition total {R} `{Number R} (weights : list R) : R := fold_left plus weights zero.

Fixpoint sum (sizes : list Z) : Z :=
  match sizes with
  | [] => 0
  | size :: rest => size + sum rest
  end.

Fixpoint count {A} (l : list A) : Z :=
  match l with
  | [] => 0
  | _ :: rest => 1 + count rest
  end.

(* The first k of a list, or all of it. *)
Fixpoint take {A} (k : Z) (l : list A) : list A :=
  match l with
  | [] => []
  | x :: rest => if k <=? 0 then [] else x :: take (k - 1) rest
  end.

Fixpoint drop {A} (k : Z) (l : list A) : list A :=
  match l with
  | [] => []
  | _ :: rest => if k <=? 0 then l else drop (k - 1) rest
  end.

(* Each element with its place, the first one at start. *)
Fixpoint numbered {A} (start : Z) (l : list A) : list (Z * A) :=
  match l with
  | [] => []
  | x :: rest => (start, x) :: numbered (start + 1) rest
  end.

(* start, start + 1, ..., stop - 1 *)
Definition range (start stop : Z) : list Z :=
  map (fun i => start + Z.of_nat i) (seq 0 (Z.to_nat (stop - start))).

(* Conventions, "Arrays": group g holds offsets[g] to offsets[g + 1]. *)
Fixpoint offsets (start : Z) (sizes : list Z) : list Z :=
  match sizes with
  | [] => [start]
  | size :: rest => start :: offsets (start + size) rest
  end.

(* Consecutive parts of a list, of the given sizes. *)
Fixpoint pieces {A} (sizes : list Z) (l : list A) : list (list A) :=
  match sizes with
  | [] => []
  | size :: rest => take size l :: pieces rest (drop size l)
  end.

(* Conventions, "Ties": who is ahead comes first; of two where none is ahead, the lower place. *)
Definition ties_by_place {A} (ahead : A -> A -> bool) (place : A -> Z) (x y : A) : bool :=
  ahead x y || (negb (ahead y x) && (place x <=? place y)).

(* Merge sort; `before x y` says that x may stand before y. Proofs see it as a permutation that is sorted. *)
Section Sorting.
  Context {A : Type} (before : A -> A -> bool).

  Fixpoint merge (left right : list A) : list A :=
    let fix merge_right (right : list A) : list A :=
      match left, right with
      | [], _ => right
      | _, [] => left
      | x :: left', y :: right' => if before x y then x :: merge left' right else y :: merge_right right'
      end
    in merge_right right.

  (* Place i of a stack holds a sorted list of 2^i elements, or nothing. *)
  Fixpoint push (l : list A) (stack : list (option (list A))) : list (option (list A)) :=
    match stack with
    | [] => [Some l]
    | None :: rest => Some l :: rest
    | Some older :: rest => None :: push (merge older l) rest
    end.

  Fixpoint collapse (stack : list (option (list A))) : list A :=
    match stack with
    | [] => []
    | None :: rest => collapse rest
    | Some l :: rest => merge (collapse rest) l
    end.

  Definition sort (l : list A) : list A := collapse (fold_left (fun stack x => push [x] stack) l []).
End Sorting.
