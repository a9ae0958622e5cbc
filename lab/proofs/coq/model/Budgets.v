(* Budgets: from text to tokens, and shares of groups. spec/crystalcache.md, CC-BUDGET-FORMS and CC-BUDGET;
   spec/policies.md, PO-WHOLE-SHARES and PO-PYRAMID-BUDGET. *)
From Coq Require Export Ascii String Qround.
From Kvspec Require Export Lists.

Inductive budget := Fraction (beta : Q) | Count (tokens : Z).

(* CC-BUDGET-FORMS: the ceiling of the exact product; a count is itself. *)
Definition tokens (b : budget) (seen : Z) : Z :=
  match b with
  | Fraction beta => Qceiling (beta * inject_Z seen)
  | Count c => c
  end.

Definition largest : Z := 2 ^ 63 - 1.

Definition admitted (b : budget) : option budget :=
  match b with
  | Fraction beta => if negb (Qle_bool beta 0) && Qle_bool beta 1 then Some b else None
  | Count c => if (1 <=? c) && (c <=? largest) then Some b else None
  end.

Definition digit (c : ascii) : option Z :=
  let n := Z.of_N (N_of_ascii c) in
  if (48 <=? n) && (n <=? 57) then Some (n - 48) else None.

(* A run of digits: their number, how many there are, and the text behind them. *)
Fixpoint digits (value seen : Z) (text : string) : Z * Z * string :=
  match text with
  | String c rest => match digit c with
                     | Some d => digits (10 * value + d) (seen + 1) rest
                     | None => (value, seen, text)
                     end
  | EmptyString => (value, seen, text)
  end.

Fixpoint spaces (text : string) : string :=
  match text with
  | String " " rest => spaces rest
  | _ => text
  end.

Definition ended (text : string) (b : budget) : option budget :=
  match spaces text with
  | EmptyString => admitted b
  | _ => None
  end.

Definition share (whole part decimals : Z) : Q := inject_Z (whole * 10 ^ decimals + part) / inject_Z (10 ^ decimals).

(* CC-BUDGET-FORMS, the grammar: count = digit+; fraction = decimal | decimal "%" | digit+ "%". *)
Definition parse (text : string) : option budget :=
  if (64 <? Z.of_nat (String.length text)) then None else
  let '(whole, before, rest) := digits 0 0 (spaces text) in
  match rest with
  | String "." rest =>
      let '(part, after, rest) := digits 0 0 rest in
      if before + after <=? 0 then None else
      let beta := share whole part after in
      match rest with
      | String "%" rest => ended rest (Fraction (beta / 100))
      | _ => ended rest (Fraction beta)
      end
  | String "%" rest => if before <=? 0 then None else ended rest (Fraction (inject_Z whole / 100))
  | _ => if before <=? 0 then None else ended rest (Count whole)
  end.

(* CC-BUDGET *)
Definition effective (b : budget) (n N_sink W_recent : Z) : Z := Z.max (N_sink + W_recent) (tokens b n).

(* PO-WHOLE-SHARES: the larger remainder first, then the lower index. *)
Definition remainder (t : Q) : Q := t - inject_Z (Qfloor t).
Definition first_served : Z * Q -> Z * Q -> bool :=
  ties_by_place (fun x y => ltb (remainder (snd y)) (remainder (snd x))) fst.

(* One more for each of the first `missing`. *)
Fixpoint served (missing : Z) (order : list (Z * Q)) : list (Z * Z) :=
  match order with
  | [] => []
  | (i, t) :: rest => (i, Qfloor t + if 0 <? missing then 1 else 0) :: served (missing - 1) rest
  end.

Definition sum_Q (targets : list Q) : Q := fold_right Qplus 0%Q targets.
Definition whole_shares (targets : list Q) : list Z :=
  let missing := Qfloor (sum_Q targets) - sum (map Qfloor targets) in
  map snd (sort (fun x y => fst x <=? fst y) (served missing (sort first_served (numbered 0 targets)))).

(* PO-PYRAMID-BUDGET: tokens beyond the window of each of L layers; `past` tokens lie before the window. *)
Definition pyramid (base past beta : Q) (L : Z) : list Q :=
  if (L =? 1) || Qle_bool past base then map (fun _ => if Qle_bool past base then past else base) (range 0 L)
  else
    let line := (base / beta)%Q in
    let least := if Qle_bool past (2 * base - line) then (2 * base - past)%Q else line in
    let most := (2 * base - least)%Q in
    map (fun l => most - inject_Z l * ((most - least) / inject_Z (L - 1)))%Q (range 0 L).
