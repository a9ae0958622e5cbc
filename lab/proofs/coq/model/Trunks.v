(* S2: chunks of S1, sentences, trunks. spec/crystalcache.md, CC-COATTENTION (chunks) and CC-SENTENCES to CC-TRUNKS. *)
From Kvspec Require Export Lists.

(* CC-COATTENTION: chunks of C tokens from the segment's first one; the last may be shorter. *)
Definition chunks (n C : Z) : list (Z * Z) :=
  map (fun i => (i * C, Z.min n ((i + 1) * C))) (range 0 ((n + C - 1) / C)).

(* CC-SENTENCES: sizes; `open` tokens of the running sentence were read. *)
Fixpoint sentences (open : Z) (ends : list bool) : list Z :=
  match ends with
  | [] => if 0 <? open then [open] else []
  | true :: rest => (open + 1) :: sentences 0 rest
  | false :: rest => sentences (open + 1) rest
  end.

(* CC-INTERFACE: the last five positions of the running trunk, the first five of the next sentence. *)
Definition last5 (start stop : Z) : list Z := range (Z.max start (stop - 5)) stop.
Definition first5 (start stop : Z) : list Z := range start (Z.min stop (start + 5)).

(* CC-SPLIT: ceil(size / T_max) pieces that differ by one at most, the larger first. *)
Definition split (T_max size : Z) : list Z :=
  let k := (size + T_max - 1) / T_max in
  repeat (size / k + 1) (Z.to_nat (size mod k)) ++ repeat (size / k) (Z.to_nat (k - size mod k)).

(* CC-EDGES: an intra edge is stored as (owner, neighbour), a cross edge as (source, owner). `near` and `far` give the
   neighbours and the sources of a token, with their weights. *)
Definition stored_edges {R} (near far : Z -> list (Z * R)) (first second : Z) : list R :=
  map snd (filter (fun edge => fst edge =? second) (near first))
  ++ map snd (filter (fun edge => fst edge =? first) (far second)).

Section Merging.
  Context {R : Type} `{Number R}.
  Variables (tau_merge : R) (T_max : Z).
  Variable E : Z -> Z -> list R.  (* the weights of the edges stored as (first, second) *)

  (* CC-INTERFACE-EDGES: by first endpoint, then by second. *)
  Definition interface_edges (current sentence : list Z) : list R :=
    flat_map (fun a => flat_map (E a) sentence) current.

  (* CC-MERGE *)
  Definition merges (weights : list R) (size next : Z) : bool :=
    (size + next <=? T_max) && ltb zero (minus (total weights) (times tau_merge (of_Z (count weights)))).

  (* CC-TRUNKS, Step 2: one pass; the running trunk is [start, stop), the next sentence begins at stop. *)
  Fixpoint merge_sentences (start stop : Z) (next : list Z) : list Z :=
    match next with
    | [] => [stop - start]
    | size :: rest =>
        let weights := interface_edges (last5 start stop) (first5 stop (stop + size)) in
        if merges weights (stop - start) size
        then merge_sentences start (stop + size) rest
        else (stop - start) :: merge_sentences stop (stop + size) rest
    end.

  (* CC-TRUNKS: sizes of the trunks of a segment that begins at start. *)
  Definition trunks (start : Z) (ends : list bool) : list Z :=
    match sentences 0 ends with
    | [] => []
    | first :: rest => flat_map (split T_max) (merge_sentences start (start + first) rest)
    end.

  (* CC-TRUNK-IMPACT: the mean of the three largest members, added from the largest down. *)
  Definition trunk_impact (members : list R) : R :=
    let top := take 3 (sort (fun x y => negb (ltb x y)) members) in
    over (total top) (of_Z (count top)).
End Merging.
