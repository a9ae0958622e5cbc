(* What a cache holds after an eviction. spec/crystalcache.md, CC-COMPACT. *)
From Kvspec Require Export Lists.

(* A cached token: its absolute position, for good, and whatever is stored with it. *)
Record stored {A : Type} := { position : Z; content : A }.
Arguments stored : clear implicits.

Section Compacting.
  Context {A : Type}.

  Definition in_set (kept : list Z) (t : stored A) : bool := existsb (Z.eqb (position t)) kept.

  (* K <- K[R], V <- V[R]: the tokens of the kept positions, in their order, as they were stored. *)
  Definition compact (kept : list Z) (cache : list (stored A)) : list (stored A) := filter (in_set kept) cache.

  (* New tokens stand at the number of tokens seen, however few are stored. *)
  Definition append (seen : Z) (new : list A) (cache : list (stored A)) : list (stored A) :=
    cache ++ map (fun '(p, x) => {| position := p; content := x |}) (numbered seen new).

  Definition read (prompt : list A) : list (stored A) := append 0 prompt [].
End Compacting.
