(* Attention over what is stored, over the real numbers. spec/crystalcache.md, CC-ATTENTION and CC-COMPACT.

   First one query over a list of stored tokens: what it takes from one of them is a logit and a value (one channel).
   Then attention as a decoder computes it: rotated queries and keys, scaling, soft cap, groups of query heads on KV
   heads, the causal mask by stored position, and runs of many steps with evictions between them. *)
From Coq Require Export Reals List Lra.
From Kvspec Require Export Lists.
Export ListNotations.
Global Open Scope R_scope.

Section Attention.
  Context {A : Type} (logit value : A -> R).

  Definition weighted (w f : A -> R) (tokens : list A) : R := fold_right Rplus 0 (map (fun t => w t * f t) tokens).

  (* Softmax with the weights exp(logit), or others. *)
  Definition average (w : A -> R) (tokens : list A) : R :=
    weighted w value tokens / weighted w (fun _ => 1) tokens.

  Definition weight (t : A) : R := exp (logit t).
  Definition attention (tokens : list A) : R := average weight tokens.

  (* The masked side: all tokens stay, and -M is added to the logits of those that are not kept. *)
  Definition masked_weight (M : R) (kept : A -> bool) (t : A) : R := exp (logit t + if kept t then 0 else - M).
  Definition masked (M : R) (kept : A -> bool) (tokens : list A) : R := average (masked_weight M kept) tokens.

  (* Masked by minus infinity: the weight is 0. *)
  Definition hidden_weight (kept : A -> bool) (t : A) : R := if kept t then weight t else 0.
  Definition hidden (kept : A -> bool) (tokens : list A) : R := average (hidden_weight kept) tokens.
End Attention.

(* A decoder layer: heads, each with what it has stored and which of it is kept; then a function of the state and of
   what the heads gave. Logits and values may depend on the state, that is, on the query. *)
Record head {X A : Type} := {
  tokens : list A;
  kept : A -> bool;
  logit : X -> A -> R;
  value : X -> A -> R
}.
Arguments head : clear implicits.

Record layer {X A : Type} := {
  heads : list (head X A);
  output : X -> list R -> X
}.
Arguments layer : clear implicits.

Section Layers.
  Context {X A : Type}.

  (* The compacted cache: each head attends to the tokens that it kept. *)
  Definition compacted_head (x : X) (h : head X A) : R := attention (logit h x) (value h x) (filter (kept h) (tokens h)).
  Definition masked_head (M : R) (x : X) (h : head X A) : R := masked (logit h x) (value h x) M (kept h) (tokens h).

  Definition run (one : X -> head X A -> R) (layers : list (layer X A)) (x : X) : X :=
    fold_left (fun x l => output l x (map (one x) (heads l))) layers x.
End Layers.

(* ---- a decoder ---- *)

(* What a KV head stores of a token: its position, its key, rotated by that position for good, and its value. *)
Record entry := { at_position : Z; key_at : list R; value_at : list R }.

(* A layer whose `query_heads` read KV heads in groups of `group`; X is a token's state. The last function is all that
   follows attention: output projection, residual, norms, MLP. *)
Record decoder_layer {X : Type} := {
  query_heads : nat;
  group : nat;
  channels : nat;
  scaling : R;
  soft_cap : R -> R;
  query : X -> nat -> list R;
  key : X -> nat -> list R;
  content : X -> nat -> list R;
  after_attention : X -> list (list R) -> X
}.
Arguments decoder_layer : clear implicits.

Section Decoder.
  Context {X : Type}.
  Variable rotate : Z -> list R -> list R.    (* rotary embedding *)

  Definition inner (u v : list R) : R := fold_right Rplus 0 (map (fun '(x, y) => x * y) (combine u v)).

  (* The KV head that query head h reads. *)
  Definition kv_head (l : decoder_layer X) (h : nat) : nat := (h / group l)%nat.

  Definition score_of (l : decoder_layer X) (p : Z) (q : list R) (t : entry) : R :=
    soft_cap l (scaling l * inner (rotate p q) (key_at t)).

  (* A query at p sees the keys at positions not above its own, of those that `mask` leaves. *)
  Definition sees (mask : Z -> bool) (p : Z) (t : entry) : bool := mask (at_position t) && (at_position t <=? p)%Z.

  (* Softmax over all that is stored, with weight 0 where nothing is seen; by channel. *)
  Definition attend (l : decoder_layer X) (mask : Z -> bool) (p : Z) (q : list R) (store : list entry) : list R :=
    map (fun c => hidden (score_of l p q) (fun t => nth c (value_at t) 0) (sees mask p) store) (seq 0 (channels l)).

  (* The same with -M in the logits where the mask hides; the causal mask stays at weight 0. *)
  Definition attend_less (M : R) (l : decoder_layer X) (mask : Z -> bool) (p : Z) (q : list R) (store : list entry) : list R :=
    let w t := if (at_position t <=? p)%Z then masked_weight (score_of l p q) M (fun t => mask (at_position t)) t else 0 in
    map (fun c => average (fun t => nth c (value_at t) 0) w store) (seq 0 (channels l)).

  (* Which positions of a layer (by its number) and KV head are left. *)
  Definition mask_of := nat -> nat -> Z -> bool.
  Definition everything : mask_of := fun _ _ _ => true.

  (* A layer with what each of its KV heads stores. *)
  Definition holding : Type := decoder_layer X * (nat -> list entry).

  (* The new tokens' keys are rotated by their positions and stored behind what is there. *)
  Definition stored_with (here : holding) (new : list (Z * X)) (kv : nat) : list entry :=
    snd here kv ++ map (fun '(p, x) => {| at_position := p; key_at := rotate p (key (fst here) x kv);
                                          value_at := content (fst here) x kv |}) new.

  Definition attention_of := decoder_layer X -> (Z -> bool) -> Z -> list R -> list entry -> list R.

  Definition through_layer (att : attention_of) (mask : nat -> Z -> bool) (here : holding) (new : list (Z * X)) : list X :=
    let l := fst here in
    map (fun '(p, x) => after_attention l x
      (map (fun h => att l (mask (kv_head l h)) p (query l x h) (stored_with here new (kv_head l h))) (seq 0 (query_heads l)))) new.

  (* A segment of tokens, the first at position `seen`, through all layers: their states, and what is stored then. *)
  Fixpoint forward (att : attention_of) (mask : mask_of) (i : nat) (layers : list holding) (seen : Z) (xs : list X) : list X * list holding :=
    match layers with
    | [] => (xs, [])
    | here :: rest =>
        let new := numbered seen xs in
        let '(ys, held) := forward att mask (S i) rest seen (through_layer att (mask i) here new) in
        (ys, (fst here, stored_with here new) :: held)
    end.

  (* Evicting below position `seen`: each KV head of each layer by its own set. *)
  Definition leaves (keep : mask_of) (seen : Z) (i kv : nat) (p : Z) : bool := keep i kv p || (seen <=? p)%Z.

  Fixpoint evict (keep : mask_of) (seen : Z) (i : nat) (layers : list holding) : list holding :=
    match layers with
    | [] => []
    | (l, store) :: rest =>
        (l, fun kv => filter (fun t => leaves keep seen i kv (at_position t)) (store kv)) :: evict keep seen (S i) rest
    end.

  (* What is read next, from the position and the states of what was read last: the sampled token, a user's turn. *)
  Variable next : Z -> list X -> list X.

  (* Before each segment something is evicted (`everything` evicts nothing). *)
  Fixpoint evicting (evictions : list mask_of) (seen : Z) (xs : list X) (layers : list holding) : list (list X) :=
    match evictions with
    | [] => []
    | keep :: rest =>
        let '(ys, held) := forward attend everything 0 (evict keep seen 0 layers) seen xs in
        ys :: evicting rest (seen + count xs) (next seen ys) held
    end.

  (* The same with all tokens stored, and the evicted ones masked in every segment from then on. *)
  Fixpoint masking (att : attention_of) (evictions : list mask_of) (seen : Z) (xs : list X) (mask : mask_of) (layers : list holding) : list (list X) :=
    match evictions with
    | [] => []
    | keep :: rest =>
        let left : mask_of := fun i kv p => mask i kv p && leaves keep seen i kv p in
        let '(ys, held) := forward att left 0 layers seen xs in
        ys :: masking att rest (seen + count xs) (next seen ys) left held
    end.
End Decoder.
