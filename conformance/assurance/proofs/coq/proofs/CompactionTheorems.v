(* Theorems about Compaction.v (CC-COMPACT). *)
From Kvspec Require Export ListFacts Compaction.

Section Compact.
  Context {A : Type}.
  Implicit Types (cache : list (stored A)) (kept : list Z).

  Lemma in_set_true kept (t : stored A) : in_set kept t = true <-> In (position t) kept.
  Proof.
    unfold in_set. rewrite existsb_exists. split.
    - intros (p & Hp & E). apply Z.eqb_eq in E. congruence.
    - intros Hp. exists (position t). now rewrite Z.eqb_refl.
  Qed.

  Lemma compact_positions kept cache p :
    In p (map position (compact kept cache)) <-> In p (map position cache) /\ In p kept.
  Proof.
    unfold compact. rewrite !in_map_iff. split.
    - intros (t & <- & Ht). apply filter_In in Ht as [Ht K]. apply in_set_true in K. split; [now exists t|assumption].
    - intros [(t & <- & Ht) K]. exists t. split; [reflexivity|]. apply filter_In. now rewrite in_set_true.
  Qed.

  Lemma filter_ascends {B} (R : B -> B -> Prop) (p : B -> bool) l : StronglySorted R l -> StronglySorted R (filter p l).
  Proof.
    induction 1 as [|x l S IH F]; cbn; [constructor|]. destruct (p x); [|assumption]. constructor; [assumption|].
    rewrite Forall_forall in *. intros y Hy. apply filter_In in Hy as [Hy _]. auto.
  Qed.

  Lemma map_position_ascends cache :
    StronglySorted Z.lt (map position cache) <-> StronglySorted (fun t u => position t < position u) cache.
  Proof.
    induction cache as [|t cache [IH IH']]; [split; constructor|]. cbn [map].
    split; intros S; inversion S as [|? ? S' F]; subst; constructor; auto.
    - rewrite Forall_map in F. exact F.
    - rewrite Forall_map. exact F.
  Qed.

  (* What is stored is exactly the kept set, in ascending order. *)
  Theorem CC_COMPACT_stores_the_kept_set kept cache :
    StronglySorted Z.lt kept -> StronglySorted Z.lt (map position cache) -> incl kept (map position cache) ->
    map position (compact kept cache) = kept.
  Proof.
    intros SK SC I. apply (ascending_unique (fun x => x)); [|assumption|].
    - apply map_position_ascends, filter_ascends. now apply map_position_ascends.
    - apply NoDup_Permutation; [|now apply ascending_NoDup|].
      + apply ascending_NoDup, map_position_ascends, filter_ascends. now apply map_position_ascends.
      + intros p. rewrite compact_positions. split; [tauto|auto].
  Qed.

  (* No token is changed: neither its position nor its content. *)
  Theorem CC_COMPACT_changes_nothing kept cache : incl (compact kept cache) cache.
  Proof. intros t Ht. now apply filter_In in Ht. Qed.

  Theorem CC_COMPACT_of_all kept cache : incl (map position cache) kept -> compact kept cache = cache.
  Proof.
    unfold compact. induction cache as [|t cache IH]; cbn; intros I; [reflexivity|].
    replace (in_set kept t) with true; [f_equal; apply IH; intros p Hp; apply I; now right|].
    symmetry. apply in_set_true, I. now left.
  Qed.

  (* Two compactions are the last one, where its set lies in the first. *)
  Theorem CC_COMPACT_twice kept kept' cache : incl kept' kept -> compact kept' (compact kept cache) = compact kept' cache.
  Proof.
    intros I. unfold compact. induction cache as [|t cache IH]; cbn; [reflexivity|].
    destruct (in_set kept t) eqn:K; cbn; [now rewrite IH|]. destruct (in_set kept' t) eqn:K'; [|assumption].
    apply in_set_true, I, in_set_true in K'. congruence.
  Qed.

  (* Idempotent: the same set again changes nothing. *)
  Theorem CC_COMPACT_idempotent kept cache : compact kept (compact kept cache) = compact kept cache.
  Proof. apply CC_COMPACT_twice. easy. Qed.

  Lemma numbered_positions s (new : list A) :
    map position (map (fun '(p, x) => {| position := p; content := x |}) (numbered s new)) = range s (s + count new).
  Proof. rewrite map_map, <- numbered_fst. apply map_ext. now intros []. Qed.

  (* Compaction commutes with appending: evicting and then reading is reading and then evicting among the old ones. *)
  Theorem CC_COMPACT_commutes_with_appending kept cache seen (new : list A) :
    Forall (fun p => p < seen) kept -> Forall (fun p => p < seen) (map position cache) ->
    append seen new (compact kept cache) = compact (kept ++ range seen (seen + count new)) (append seen new cache).
  Proof.
    intros HK HC. unfold append, compact. rewrite filter_app. f_equal.
    - apply filter_ext_in. intros t Ht. apply Bool.eq_iff_eq_true. rewrite !in_set_true, in_app_iff, in_range.
      rewrite Forall_forall in HC. specialize (HC _ (in_map position _ _ Ht)). intuition lia.
    - symmetry. apply CC_COMPACT_of_all. rewrite numbered_positions. intros p Hp. apply in_or_app. now right.
  Qed.

  (* Chunks compose: a prompt that is read in two pieces is read. *)
  Theorem CC_COMPACT_chunks_compose (first second : list A) :
    append (count first) second (read first) = read (first ++ second).
  Proof.
    unfold read, append. cbn [app]. rewrite <- map_app. f_equal.
    replace (count first) with (0 + count first) by lia. generalize 0 as s.
    induction first as [|x first IH]; intros s; cbn [numbered app count]; [now rewrite Z.add_0_r|].
    f_equal. rewrite <- IH. f_equal. f_equal. lia.
  Qed.

  (* A batch is the stack of its singles: each row by its own kept set. *)
  Theorem CC_COMPACT_batch (rows : list (list Z * list (stored A))) i kept cache :
    nth_error rows i = Some (kept, cache) ->
    nth_error (map (fun '(kept, cache) => compact kept cache) rows) i = Some (compact kept cache).
  Proof. intros E. rewrite nth_error_map, E. reflexivity. Qed.
End Compact.

(* Renumbering is not harmless: the next token would stand at 2 where 4 tokens were seen. *)
Theorem CC_COMPACT_does_not_renumber :
  map position (append 4 [true] (compact [0; 3] (read [true; true; true; true]))) = [0; 3; 4]
  /\ map position (append 2 [true] (compact [0; 3] (read [true; true; true; true]))) = [0; 3; 2].
Proof. split; reflexivity. Qed.
