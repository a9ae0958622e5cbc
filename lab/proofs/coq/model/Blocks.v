(* Whole blocks of tokens. spec/policies.md, PO-BEST-BLOCKS: full blocks are chosen as single tokens are. *)
From Kvspec Require Export Selection.

Section Blocks.
  Context {R : Type} `{Number R}.
  Variable b : Z.                              (* how many tokens a block holds *)
  Variable tokens : list (option R * bool).    (* of each its score, or none, and whether it is protected *)

  (* From the lowest position up. A token without a score leaves its block without one. *)
  Definition block_score (scores : list (option R)) : option R :=
    fold_left (fun sum x => match sum, x with Some sum, Some x => Some (plus sum x) | _, _ => None end) scores (Some zero).

  (* A protected token keeps its block. *)
  Definition full_block (j : Z) : unit_of R :=
    let block := take b (drop (b * j) tokens) in
    {| first := j; width := 1; value := block_score (map fst block); pinned := existsb snd block |}.

  Definition full_blocks : list (unit_of R) := map full_block (range 0 (count tokens / b)).

  (* The tokens behind the full blocks: the open block, which always stays and takes places of the share. *)
  Definition open_tokens : Z := count tokens mod b.
  Definition places (B : Z) : Z := Z.max 0 ((B - open_tokens) / b).

  Definition block_positions (j : Z) : list Z := range (b * j) (b * j + b).

  Definition best_blocks (B : Z) : list Z :=
    flat_map block_positions (selected (places B) full_blocks) ++ range (count tokens - open_tokens) (count tokens).
End Blocks.
