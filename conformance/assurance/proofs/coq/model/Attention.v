(* Attention over what is stored, over the real numbers. spec/crystalcache.md, CC-ATTENTION and CC-COMPACT.

   One query sees a list of stored tokens. What it takes from one of them is a logit and a value (one channel: the
   others are computed alike). Both are functions of the stored token, whose position is part of it: a key stays
   rotated by the position at which it was read (RoPE), so that nothing here depends on slots. *)
From Coq Require Export Reals List Lra.
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
  Definition hidden_head (x : X) (h : head X A) : R := hidden (logit h x) (value h x) (kept h) (tokens h).

  Definition run (one : X -> head X A -> R) (layers : list (layer X A)) (x : X) : X :=
    fold_left (fun x l => output l x (map (one x) (heads l))) layers x.
End Layers.
