(* Set-conditioned selection: a token's worth falls as tokens like it are kept. spec/diversity.md, DV-COSINE, DV-GREEDY. *)
From Kvspec Require Export Lists.

Section Choosing.
  Context {R : Type} `{Number R}.

  (* DV-COSINE: products are added from the first channel to the last. *)
  Definition dot (u v : list R) : R := total (map (fun '(x, y) => times x y) (combine u v)).

  (* A token that may still be chosen: its score, and how like it the most similar kept token is, at least 0. *)
  Record candidate := { place : Z; worth : R; likeness : R }.

  Variables (lambda : R) (similarity : Z -> Z -> R).

  Definition gain (c : candidate) : R := minus (worth c) (times lambda (likeness c)).

  (* The greater gain first, then the lower position. *)
  Definition chosen_before : candidate -> candidate -> bool := ties_by_place (fun c d => ltb (gain d) (gain c)) place.

  Fixpoint best (open : list candidate) : option candidate :=
    match open with
    | [] => None
    | c :: rest => match best rest with
                   | None => Some c
                   | Some d => Some (if chosen_before c d then c else d)
                   end
    end.

  (* What is open once the token at i is kept. *)
  Definition nearer (i : Z) (c : candidate) : candidate :=
    let s := similarity i (place c) in
    {| place := place c; worth := worth c; likeness := if ltb (likeness c) s then s else likeness c |}.
  Definition without (i : Z) (open : list candidate) : list candidate :=
    map (nearer i) (filter (fun c => negb (place c =? i)) open).

  (* DV-GREEDY: tokens in the order in which they are chosen. *)
  Fixpoint grow (rounds : nat) (open : list candidate) : list Z :=
    match rounds, best open with
    | S rounds, Some c => place c :: grow rounds (without (place c) open)
    | _, _ => []
    end.

  Definition diverse (scores : list R) (retained : list bool) (k : Z) : list Z :=
    let all := numbered 0 (combine scores retained) in
    let kept := map fst (filter (fun t => snd (snd t)) all) in
    let fresh := map (fun t => {| place := fst t; worth := fst (snd t); likeness := zero |}) all in
    let open := fold_left (fun open i => without i open) kept fresh in
    sort Z.leb (kept ++ grow (Z.to_nat (k - count kept)) open).
End Choosing.
Arguments candidate : clear implicits.
