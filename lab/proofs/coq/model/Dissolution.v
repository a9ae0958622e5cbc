(* S6: which tokens of which trunks stay. spec/crystalcache.md, CC-PROTECTED to CC-DISSOLVE. *)
From Kvspec Require Export Lists.

(* CC-PROTECTED: the trunk [start, stop) meets the sink or the recent window of n tokens. *)
Definition protected (n N_sink W_recent start stop : Z) : bool :=
  (start <? N_sink) || (n - W_recent <? stop).

(* CC-CUT: from the tokens of protected and of other trunks, and B. *)
Definition cut (B_prot T_alive B : Z) : Z := Z.min (Z.max 0 (T_alive - (B - B_prot))) T_alive.

(* CC-ALLOCATE, one trunk: how many of its tokens stay, and the cut that is left. *)
Definition allocate_step (N_min size c : Z) : Z * Z :=
  if c <=? 0 then (size, c)
  else if size <=? c then (0, c - size)
  else if N_min <=? size - c then (size - c, 0)
  else (0, c - size).

(* CC-ALLOCATE: tokens that stay of each trunk, from the lowest score up; r is their share of the trunk. *)
Fixpoint allocate (N_min : Z) (sizes : list Z) (c : Z) : list Z :=
  match sizes with
  | [] => []
  | size :: rest => let (stays, left) := allocate_step N_min size c in stays :: allocate N_min rest left
  end.

(* CC-KEEP-COUNT: an exact r, rounded half to even. *)
Definition round_half_even (x : Q) : Z :=
  let down := Qnum x / Zpos (Qden x) in
  let twice := 2 * (Qnum x mod Zpos (Qden x)) in
  if twice <? Zpos (Qden x) then down
  else if Zpos (Qden x) <? twice then down + 1
  else if Z.even down then down else down + 1.

Definition keep_count (r : Q) (size N_min : Z) : Z :=
  Z.min size (Z.max N_min (round_half_even (r * inject_Z size))).

Record trunk {R : Type} := {
  start : Z;           (* position of its first token *)
  members : list R;    (* M_i of its tokens *)
  score : R;           (* read only where it is not safe *)
  strength : R;        (* D *)
  safe : bool          (* protected *)
}.
Arguments trunk : clear implicits.

Section Dissolving.
  Context {R : Type} `{Number R}.

  Definition size (g : trunk R) : Z := count (members g).

  (* Of two trunks the lower score is evicted first; of equal scores the lower trunk. *)
  Definition goes_before : trunk R -> trunk R -> bool := ties_by_place (fun g h => ltb (score g) (score h)) start.

  (* Of the members of a partial trunk the higher M_i stays first; of equal ones the lower position. *)
  Definition stays_before : Z * R -> Z * R -> bool := ties_by_place (fun i j => ltb (snd j) (snd i)) fst.

  Definition kept_members (g : trunk R) (k : Z) : list Z :=
    let strongest := take k (sort stays_before (numbered (start g) (members g))) in
    map fst (sort (fun i j => fst i <=? fst j) strongest).

  (* CC-DISSOLVE: each trunk with the number of its tokens that stay, in order of position. *)
  Definition stays (N_min B : Z) (all : list (trunk R)) : list (trunk R * Z) :=
    let alive := sort goes_before (filter (fun g => negb (safe g)) all) in
    let safe_ones := filter safe all in
    let c_0 := cut (sum (map size safe_ones)) (sum (map size alive)) B in
    sort (fun x y => start (fst x) <=? start (fst y))
      (combine alive (allocate N_min (map size alive) c_0) ++ map (fun g => (g, size g)) safe_ones).

  Definition kept (N_min B : Z) (all : list (trunk R)) : list Z :=
    flat_map (fun '(g, k) => kept_members g k) (stays N_min B all).

  (* CC-ALLOCATE, CC-DISSOLVE-D: r is one division; D is multiplied by it. *)
  Definition ratio (g : trunk R) (k : Z) : R := over (of_Z k) (of_Z (size g)).
  Definition weakened (g : trunk R) (k : Z) : R := times (ratio g k) (strength g).
End Dissolving.
