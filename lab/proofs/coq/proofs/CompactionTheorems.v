(* Theorems about Compaction.v (CC-COMPACT). *)
From Kvspec Require Export CountTheorems Compaction.

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

  Lemma numbered_nth (l : list A) : forall s p x, In (p, x) (numbered s l) -> nth_error l (Z.to_nat (p - s)) = Some x.
  Proof.
    induction l as [|y l IH]; intros s p x Hp; cbn in Hp; [easy|]. destruct Hp as [E|Hp].
    - injection E as <- <-. now rewrite Z.sub_diag.
    - assert (s + 1 <= p) by (apply (in_map fst) in Hp; rewrite numbered_fst in Hp; apply in_range in Hp; cbn in Hp; lia).
      replace (Z.to_nat (p - s)) with (S (Z.to_nat (p - (s + 1)))) by lia. cbn. now apply IH.
  Qed.

  Lemma numbered_positions s (new : list A) :
    map position (map (fun '(p, x) => {| position := p; content := x |}) (numbered s new)) = range s (s + count new).
  Proof. rewrite map_map, <- numbered_fst. apply map_ext. now intros []. Qed.

  Lemma read_positions (text : list A) : map position (read text) = range 0 (count text).
  Proof. unfold read, append. cbn [app]. rewrite numbered_positions. now rewrite Z.add_0_l. Qed.

  (* K[R]: what is stored is the kept set, and with each position what the text has there. *)
  Theorem CC_COMPACT_gathers kept (text : list A) : StronglySorted Z.lt kept -> incl kept (range 0 (count text)) ->
    map position (compact kept (read text)) = kept
    /\ map (fun t => Some (content t)) (compact kept (read text)) = map (fun p => nth_error text (Z.to_nat p)) kept.
  Proof.
    intros S I. assert (map position (compact kept (read text)) = kept) as E.
    { apply CC_COMPACT_stores_the_kept_set; [assumption|..]; rewrite read_positions; [apply range_ascends|assumption]. }
    split; [assumption|]. rewrite <- E at 2. rewrite map_map. apply map_ext_in. intros t Ht.
    apply filter_In in Ht as [Ht _]. apply in_map_iff in Ht as ([p x] & <- & Hp). apply numbered_nth in Hp.
    rewrite Z.sub_0_r in Hp. cbn [position content]. now rewrite Hp.
  Qed.

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

  (* A second eviction, of a cache with gaps: the prompt was evicted to `first`, then `new` was read. Trunks are laid out in
     slots; what they keep, read as positions, is stored at those positions with what the whole text has there. *)
  Theorem CC_COMPACT_second_eviction {R} `{Number R} first (prompt new : list A) N_min B (all : list (trunk R)) :
    StronglySorted Z.lt first -> incl first (range 0 (count prompt)) ->
    let cache := append (count prompt) new (compact first (read prompt)) in
    laid_out 0 all -> tokens_of all = count cache ->
    let second := at_slots (map position cache) (kept N_min B all) in
    map position (compact second cache) = second
    /\ map (fun t => Some (content t)) (compact second cache) = map (fun p => nth_error (prompt ++ new) (Z.to_nat p)) second
    /\ count second = count (kept N_min B all).
  Proof.
    intros Sf If cache L T second.
    assert (map position cache = first ++ range (count prompt) (count prompt + count new)) as P.
    { unfold cache, append. rewrite map_app, numbered_positions. f_equal. now apply CC_COMPACT_gathers. }
    assert (StronglySorted Z.lt (map position cache)) as S.
    { rewrite P. apply StronglySorted_app; [assumption|apply range_ascends|]. intros x y Hx Hy. apply If in Hx.
      apply in_range in Hx, Hy. lia. }
    destruct (CC_DISSOLVE_with_gaps N_min 0 all L (map position cache) B eq_refl ltac:(now rewrite count_map) S) as (S2 & I2 & C2).
    fold second in S2, I2, C2.
    assert (compact second cache = compact second (read (prompt ++ new))) as ->.
    { unfold cache. rewrite CC_COMPACT_commutes_with_appending, CC_COMPACT_chunks_compose.
      - apply CC_COMPACT_twice. now rewrite <- P.
      - apply Forall_forall. intros p Hp. apply If, in_range in Hp. lia.
      - apply Forall_forall. rewrite read_positions. intros p Hp. apply in_range in Hp. lia. }
    assert (incl second (range 0 (count (prompt ++ new)))) as I.
    { intros p Hp. apply I2 in Hp. rewrite P in Hp. rewrite count_app. pose proof (count_nonneg new). pose proof (count_nonneg prompt).
      apply in_app_or in Hp as [Hp|Hp]; [apply If in Hp|]; apply in_range in Hp; apply in_range; lia. }
    destruct (CC_COMPACT_gathers second (prompt ++ new) S2 I) as [E1 E2]. repeat split; assumption.
  Qed.
End Compact.

(* Renumbering is not harmless: the next token would stand at 2 where 4 tokens were seen. *)
Theorem CC_COMPACT_does_not_renumber :
  map position (append 4 [true] (compact [0; 3] (read [true; true; true; true]))) = [0; 3; 4]
  /\ map position (append 2 [true] (compact [0; 3] (read [true; true; true; true]))) = [0; 3; 2].
Proof. split; reflexivity. Qed.
