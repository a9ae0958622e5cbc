(* Theorems about what Dissolution.v keeps. A name begins with its item: CC_DISSOLVE_size is about CC-DISSOLVE. *)
From Kvspec Require Export Ranks DissolutionTheorems.

(* Trunks side by side, the first at position s, none empty. *)
Fixpoint laid_out {R} (s : Z) (all : list (trunk R)) : Prop :=
  match all with
  | [] => True
  | g :: rest => start g = s /\ 1 <= size g /\ laid_out (s + size g) rest
  end.

Definition tokens_of {R} (all : list (trunk R)) : Z := sum (map size all).
Definition safe_tokens {R} (all : list (trunk R)) : Z := tokens_of (filter safe all).

Lemma laid_out_starts {R} (all : list (trunk R)) : forall s, laid_out s all ->
  Forall (fun g => s <= start g /\ start g + size g <= s + tokens_of all /\ 1 <= size g) all.
Proof.
  unfold tokens_of. induction all as [|g rest IH]; intros s L; cbn [laid_out map sum] in *; [constructor|].
  destruct L as (<- & Hg & L). specialize (IH _ L).
  assert (0 <= sum (map size rest)).
  { apply sum_nonneg, Forall_map. eapply Forall_impl; [|exact IH]. cbn beta. lia. }
  constructor; [lia|]. eapply Forall_impl; [|exact IH]. cbn beta. lia.
Qed.

Lemma laid_out_ascends {R} (all : list (trunk R)) : forall s, laid_out s all ->
  StronglySorted (fun g h => start g + size g <= start h) all.
Proof.
  induction all as [|g rest IH]; intros s L; cbn [laid_out] in L; [constructor|]. destruct L as (<- & Hg & L).
  constructor; [now apply (IH _ L)|]. pose proof (laid_out_starts rest _ L) as F.
  eapply Forall_impl; [|exact F]. cbn beta. lia.
Qed.

Lemma keys_unique {A} (l : list (Z * A)) : NoDup (map fst l) -> forall z a b, In (z, a) l -> In (z, b) l -> a = b.
Proof.
  induction l as [|[u c] l IH]; cbn; intros N z a b Ha Hb; [easy|]. inversion N; subst.
  destruct Ha as [Ea|Ha], Hb as [Eb|Hb]; try congruence.
  - injection Ea as -> ->. exfalso. apply H1. change z with (fst (z, b)). now apply in_map.
  - injection Eb as -> ->. exfalso. apply H1. change z with (fst (z, a)). now apply in_map.
  - eauto.
Qed.

Section Members.
  Context {R : Type} `{Number R}.

  Lemma kept_members_permutation (g : trunk R) k :
    Permutation (kept_members g k) (map fst (take k (sort stays_before (numbered (start g) (members g))))).
  Proof. unfold kept_members. apply Permutation_map, sort_permutation. Qed.

  Lemma ranked_permutation (g : trunk R) :
    Permutation (map fst (sort stays_before (numbered (start g) (members g)))) (range (start g) (start g + size g)).
  Proof.
    unfold size. rewrite <- numbered_fst. apply Permutation_map, sort_permutation.
  Qed.

  Lemma taken_NoDup (g : trunk R) k : NoDup (map fst (take k (sort stays_before (numbered (start g) (members g))))).
  Proof.
    assert (NoDup (map fst (sort stays_before (numbered (start g) (members g))))) as N.
    { eapply Permutation_NoDup; [apply Permutation_sym, ranked_permutation|].
      apply ascending_NoDup, range_ascends. }
    rewrite <- (take_drop k (sort _ _)), map_app in N. now apply NoDup_left in N.
  Qed.

  Lemma kept_members_in (g : trunk R) k x : In x (kept_members g k) -> start g <= x < start g + size g.
  Proof.
    intros Hx. apply (Permutation_in _ (kept_members_permutation g k)) in Hx.
    apply in_range, (Permutation_in _ (ranked_permutation g)).
    apply in_map_iff in Hx as (i & <- & Hi). apply in_map. now apply take_incl in Hi.
  Qed.

  Lemma kept_members_ascend (g : trunk R) k : StronglySorted Z.lt (kept_members g k).
  Proof.
    unfold kept_members. eapply StronglySorted_map with (R := fun i j : Z * R => fst i < fst j); [easy|].
    apply ascending_strictly; [apply sort_places|].
    eapply Permutation_NoDup; [|apply taken_NoDup]. apply Permutation_map, Permutation_sym, sort_permutation.
  Qed.

  Lemma kept_members_count (g : trunk R) k : 0 <= k <= size g -> count (kept_members g k) = k.
  Proof.
    intros Hk. rewrite (count_permutation _ _ (kept_members_permutation g k)), count_map, count_take.
    rewrite (count_permutation _ _ (sort_permutation _ _)). unfold size in Hk.
    rewrite <- (count_map snd), numbered_snd. lia.
  Qed.

  (* A whole trunk is all of its positions. *)
  Lemma kept_members_whole (g : trunk R) : kept_members g (size g) = range (start g) (start g + size g).
  Proof.
    apply (ascending_unique (fun x => x)); [apply kept_members_ascend|apply range_ascends|].
    rewrite kept_members_permutation, take_all; [apply ranked_permutation|].
    rewrite (count_permutation _ _ (sort_permutation _ _)), <- (count_map snd), numbered_snd. reflexivity.
  Qed.

  Lemma kept_members_monotone (g : trunk R) k k' : k <= k' -> incl (kept_members g k) (kept_members g k').
  Proof.
    intros Hk x Hx. apply (Permutation_in _ (kept_members_permutation g k)) in Hx.
    apply (Permutation_in _ (Permutation_sym (kept_members_permutation g k'))).
    apply in_map_iff in Hx as (i & <- & Hi). apply in_map. now apply (take_mono k k').
  Qed.

  (* How many members of g come before the one at x, which has the impact M: the higher M_i, of equal ones the lower
     position. *)
  Definition stronger (g : trunk R) (x : Z) (M : R) : Z :=
    count (filter (fun y => ltb M (snd y) || (negb (ltb (snd y) M) && (fst y <? x))) (numbered (start g) (members g))).

  (* A member is among the k that stay iff fewer than k members come before it. *)
  Theorem CC_DISSOLVE_members `{!Ordered R} (g : trunk R) k x M : In (x, M) (numbered (start g) (members g)) ->
    In x (kept_members g k) <-> stronger g x M < k.
  Proof.
    intros Ix. assert (NoDup (map fst (numbered (start g) (members g)))) as N
      by (rewrite numbered_fst; apply ascending_NoDup, range_ascends).
    unfold stronger. change (fun y : Z * R => ltb M (snd y) || (negb (ltb (snd y) M) && (fst y <? x)))
      with (earlier (fun i j : Z * R => ltb (snd j) (snd i)) fst (x, M)).
    rewrite <- in_take_sorted; [|intros; now apply ltb_asym|intros i j l; rewrite or_comm; apply ltb_cotrans|assumption..].
    split.
    - intros K. apply (Permutation_in _ (kept_members_permutation g k)) in K.
      apply in_map_iff in K as ([z M'] & E & Ki). cbn in E. subst z.
      rewrite (keys_unique _ N x M M'); [assumption..|]. now apply take_incl, in_sort in Ki.
    - intros T. apply (Permutation_in _ (Permutation_sym (kept_members_permutation g k))).
      change x with (fst (x, M)). now apply in_map.
  Qed.
End Members.

Section Kept.
  Context {R : Type} `{Number R}.
  Variables (N_min : Z) (s : Z) (all : list (trunk R)).
  Hypothesis laid : laid_out s all.

  Let alive := sort goes_before (filter (fun g : trunk R => negb (safe g)) all).
  Let alive_stay B := allocate N_min (map size alive) (cut (safe_tokens all) (tokens_of alive) B).
  Let pairs B := combine alive (alive_stay B) ++ map (fun g => (g, size g)) (filter safe all).

  Lemma stays_permutation B : Permutation (stays N_min B all) (pairs B).
  Proof. unfold stays. apply sort_permutation. Qed.

  Lemma alive_length B : length (alive_stay B) = length alive.
  Proof. unfold alive_stay. rewrite allocate_length, map_length. reflexivity. Qed.

  Lemma combine_fst {A C} (l : list A) (r : list C) : length r = length l -> map fst (combine l r) = l.
  Proof.
    revert r; induction l as [|x l IH]; intros [|y r] E; cbn in *; try easy. rewrite IH; [reflexivity|lia].
  Qed.

  Lemma combine_snd {A C} (l : list A) (r : list C) : length r = length l -> map snd (combine l r) = r.
  Proof.
    revert r; induction l as [|x l IH]; intros [|y r] E; cbn in *; try easy. rewrite IH; [reflexivity|lia].
  Qed.

  Lemma pairs_fst B : Permutation (map fst (pairs B)) all.
  Proof.
    unfold pairs. rewrite map_app, map_map, map_id, combine_fst by apply alive_length.
    unfold alive. rewrite (sort_permutation goes_before). apply partition_permutation.
  Qed.

  Lemma all_sizes : Forall (fun g => 1 <= size g) all.
  Proof. eapply Forall_impl; [|exact (laid_out_starts all s laid)]. cbn beta. tauto. Qed.

  Lemma alive_positive : positive (map size alive).
  Proof.
    apply Forall_map. unfold alive. apply (Permutation_Forall (Permutation_sym (sort_permutation _ _))).
    pose proof all_sizes as F. apply Forall_forall. intros g Hg. apply filter_In in Hg as [Hg _].
    rewrite Forall_forall in F. now apply F.
  Qed.

  Lemma pairs_within B : Forall (fun p => 0 <= snd p <= size (fst p)) (pairs B).
  Proof.
    unfold pairs. apply Forall_app. split.
    - pose proof (CC_ALLOCATE_within N_min (map size alive) (cut (safe_tokens all) (tokens_of alive) B) alive_positive) as W.
      fold (alive_stay B) in W. clear - W. revert W. generalize (alive_stay B) as ks.
      induction alive as [|g l IH]; intros ks W; inversion W; subst; cbn; constructor; auto.
    - apply Forall_map, Forall_forall. intros g Hg. cbn. pose proof (count_nonneg (members g)). unfold size. lia.
  Qed.

  (* Every trunk is decided once, in order of position. *)
  Theorem CC_DISSOLVE_every_trunk B : map fst (stays N_min B all) = all.
  Proof.
    apply (ascending_unique start).
    - apply ascending_strictly with (key := start).
      + eapply StronglySorted_map with (R := fun x y : trunk R * Z => start (fst x) <= start (fst y)); [easy|].
        apply sort_places.
      + eapply Permutation_NoDup; [apply Permutation_map, Permutation_sym|].
        * rewrite stays_permutation. apply pairs_fst.
        * pose proof (laid_out_ascends all s laid) as S. pose proof all_sizes as F. clear - S F.
          induction S as [|g l S IH G]; cbn; constructor; inversion F; subst; [|now apply IH].
          intros I. apply in_map_iff in I as (h & E & Hh). rewrite Forall_forall in G. specialize (G h Hh). lia.
    - pose proof (laid_out_ascends all s laid) as S. pose proof all_sizes as F. clear - S F.
      induction S as [|g l S IH G]; constructor; inversion F; subst; [now apply IH|].
      eapply Forall_impl; [|exact G]. cbn beta. lia.
    - rewrite stays_permutation. apply pairs_fst.
  Qed.

  Lemma stays_within B : Forall (fun p => 0 <= snd p <= size (fst p)) (stays N_min B all).
  Proof. apply (Permutation_Forall (Permutation_sym (stays_permutation B))), pairs_within. Qed.

  Lemma kept_count B : count (kept N_min B all) = sum (map snd (stays N_min B all)).
  Proof.
    unfold kept. apply count_flat_map. eapply Forall_impl; [|exact (stays_within B)].
    intros [g k]. cbn. apply kept_members_count.
  Qed.

  Lemma safe_tokens_nonneg : 0 <= safe_tokens all.
  Proof. apply sum_nonneg, Forall_map, Forall_forall. intros g _. apply count_nonneg. Qed.

  Lemma alive_tokens : tokens_of alive + safe_tokens all = tokens_of all /\ 0 <= tokens_of alive.
  Proof.
    split; [|apply sum_nonneg, Forall_map, Forall_forall; intros g _; apply count_nonneg].
    unfold tokens_of, safe_tokens, alive, tokens_of.
    rewrite (sum_permutation _ _ (Permutation_map size (sort_permutation _ _))).
    pose proof (sum_partition safe size all). lia.
  Qed.

  Lemma kept_tokens B : count (kept N_min B all) = sum (alive_stay B) + safe_tokens all.
  Proof.
    rewrite kept_count, (sum_permutation _ _ (Permutation_map snd (stays_permutation B))).
    unfold pairs. rewrite map_app, map_map, sum_app, combine_snd by apply alive_length. reflexivity.
  Qed.

  (* Balance: what stays is everything, less the cut, less an overshoot of at most N_min - 1. *)
  Theorem CC_DISSOLVE_balance B : let c_0 := cut (safe_tokens all) (tokens_of all - safe_tokens all) B in
    c_0 <= tokens_of all - count (kept N_min B all) <= c_0 + slack N_min.
  Proof.
    cbn zeta. destruct alive_tokens as [E Ha]. pose proof safe_tokens_nonneg. rewrite kept_tokens.
    replace (tokens_of all - safe_tokens all) with (tokens_of alive) by lia.
    pose proof (cut_bounds (safe_tokens all) (tokens_of alive) B Ha) as HC.
    pose proof (CC_ALLOCATE_balance N_min _ alive_positive _ HC) as A. fold (alive_stay B) in A.
    fold (tokens_of alive) in A. lia.
  Qed.

  (* n tokens, or the protected ones above B, or from B - (N_min - 1) to B. *)
  Theorem CC_DISSOLVE_size B : let size := count (kept N_min B all) in
    (tokens_of all <= B -> size = tokens_of all)
    /\ (B <= safe_tokens all -> size = safe_tokens all \/ tokens_of all <= B)
    /\ (safe_tokens all <= B < tokens_of all -> B - slack N_min <= size <= B).
  Proof.
    cbn zeta. destruct alive_tokens as [E Ha]. pose proof safe_tokens_nonneg as HP.
    pose proof (CC_DISSOLVE_balance B) as Bal. cbn zeta in Bal. unfold cut in Bal.
    assert (safe_tokens all <= count (kept N_min B all)) as Floor.
    { rewrite kept_tokens. enough (0 <= sum (alive_stay B)) by lia. apply sum_nonneg. unfold alive_stay.
      pose proof (CC_ALLOCATE_within N_min _ (cut (safe_tokens all) (tokens_of alive) B) alive_positive) as W.
      revert W. generalize (allocate N_min (map size alive) (cut (safe_tokens all) (tokens_of alive) B)) as ks.
      generalize (map size alive). induction 1; constructor; [lia|assumption]. }
    assert (tokens_of all <= B -> count (kept N_min B all) = tokens_of all) as Whole.
    { intros HB. rewrite kept_tokens. unfold alive_stay, cut. rewrite CC_ALLOCATE_stop by lia.
      fold (tokens_of alive). lia. }
    split; [exact Whole|]. split; intros HB; [|lia].
    destruct (Z_le_gt_dec (tokens_of all) B); [now right|left; lia].
  Qed.

  (* The budget is met, or what is kept is protected. *)
  Theorem CC_DISSOLVE_budget B : count (kept N_min B all) <= Z.max B (safe_tokens all).
  Proof. pose proof (CC_DISSOLVE_size B) as S. cbn zeta in S. lia. Qed.

  (* Kept positions ascend without repetition, inside the segment. *)
  Theorem CC_DISSOLVE_ascends B : StronglySorted Z.lt (kept N_min B all).
  Proof.
    unfold kept. pose proof (laid_out_ascends all s laid) as S. rewrite <- (CC_DISSOLVE_every_trunk B) in S.
    induction (stays N_min B all) as [|[g k] l IH]; cbn [flat_map]; [constructor|].
    cbn [map fst] in S. inversion S as [|? ? S' F]; subst. apply StronglySorted_app; [apply kept_members_ascend|now apply IH|].
    intros x y Hx Hy. apply kept_members_in in Hx. apply in_flat_map in Hy as ([h j] & Hh & Hy).
    apply kept_members_in in Hy. rewrite Forall_forall in F. specialize (F h (in_map fst _ _ Hh)). lia.
  Qed.

  Theorem CC_DISSOLVE_inside B x : In x (kept N_min B all) -> s <= x < s + tokens_of all.
  Proof.
    intros Hx. unfold kept in Hx. apply in_flat_map in Hx as ([g k] & Hg & Hx). apply kept_members_in in Hx.
    apply (in_map fst) in Hg. rewrite CC_DISSOLVE_every_trunk in Hg. cbn in Hg.
    pose proof (laid_out_starts all s laid) as F. rewrite Forall_forall in F. specialize (F g Hg). lia.
  Qed.

  (* Protected trunks stay whole, whatever B. *)
  Theorem CC_DISSOLVE_protected B g x :
    In g all -> safe g = true -> start g <= x < start g + size g -> In x (kept N_min B all).
  Proof.
    intros Hg Sg Hx. unfold kept. apply in_flat_map. exists (g, size g). split.
    - apply (Permutation_in _ (Permutation_sym (stays_permutation B))). unfold pairs. apply in_or_app. right.
      apply in_map_iff. exists g. split; [reflexivity|]. now apply filter_In.
    - rewrite kept_members_whole. now apply in_range.
  Qed.

  (* Budgets nest. *)
  Theorem CC_DISSOLVE_nested B B' : B <= B' -> incl (kept N_min B all) (kept N_min B' all).
  Proof.
    intros HB x Hx. unfold kept in *. apply in_flat_map in Hx as ([g k] & Hg & Hx).
    apply (Permutation_in _ (stays_permutation B)) in Hg.
    assert (exists k', k <= k' /\ In (g, k') (pairs B')) as (k' & Hk & Hg').
    { unfold pairs in *. apply in_app_or in Hg as [Hg|Hg]; [|exists k; split; [lia|apply in_or_app; now right]].
      destruct alive_tokens as [E Ha]. pose proof safe_tokens_nonneg.
      pose proof (CC_ALLOCATE_monotone N_min (map size alive) alive_positive
        (cut (safe_tokens all) (tokens_of alive) B') (cut (safe_tokens all) (tokens_of alive) B)) as M.
      specialize (M ltac:(unfold cut; lia)). fold (alive_stay B) (alive_stay B') in M.
      assert (length (alive_stay B) = length alive) as L by apply alive_length. clear - Hg M L. revert Hg M L.
      generalize (alive_stay B) as ks, (alive_stay B') as ks'. induction alive as [|h l IH]; intros ks ks' Hg M L.
      - destruct Hg.
      - destruct M as [|k0' k0 ks' ks Hk M]; [destruct Hg|]. cbn in *. destruct Hg as [Hg|Hg].
        + injection Hg as <- <-. exists k0'. split; [assumption|now left].
        + destruct (IH ks ks' Hg M ltac:(lia)) as (k' & Hk' & Hi). exists k'. split; [assumption|].
          now right. }
    apply in_flat_map. exists (g, k'). split.
    - now apply (Permutation_in _ (Permutation_sym (stays_permutation B'))).
    - now apply (kept_members_monotone g k k').
  Qed.

  (* Of two unprotected trunks, the one with the lower score, of equal ones the lower trunk, loses everything before the
     other loses a token. *)
  Theorem CC_DISSOLVE_order `{!Ordered R} B g h k j :
    In (g, k) (stays N_min B all) -> In (h, j) (stays N_min B all) -> safe g = false -> safe h = false ->
    ltb (score g) (score h) = true \/ (ltb (score h) (score g) = false /\ start g < start h) -> k = 0 \/ j = size h.
  Proof.
    intros Hg Hh Sg Sh L.
    assert (goes_before h g = false) as NB.
    { apply not_true_iff_false. intros B'. unfold goes_before in B'. apply ties_true in B' as [B'|[B' P]].
      - destruct L as [L|[L _]]; [pose proof (ltb_asym _ _ L)|]; congruence.
      - destruct L as [L|[_ L]]; [congruence|lia]. }
    assert (forall p, In p (stays N_min B all) -> safe (fst p) = false -> In p (combine alive (alive_stay B))) as A.
    { intros p Hp Sp. apply (Permutation_in _ (stays_permutation B)) in Hp. unfold pairs in Hp.
      apply in_app_or in Hp as [Hp|Hp]; [assumption|]. apply in_map_iff in Hp as (f & <- & Hf).
      apply filter_In in Hf as [_ Sf]. cbn in Sp. congruence. }
    apply A in Hg; [|assumption]. apply A in Hh; [|assumption].
    assert (StronglySorted (fun f f' : trunk R => goes_before f f' = true) alive) as So.
    { apply sort_ties; [intros; now apply ltb_asym|intros; now apply ltb_cotrans]. }
    unfold alive_stay in *. clear A. revert So Hg Hh. generalize (cut (safe_tokens all) (tokens_of alive) B) as c.
    induction alive as [|f l IH]; intros c So Hg Hh; cbn [map allocate] in *; [destruct Hg|].
    inversion So as [|? ? So' F]; subst. rewrite Forall_forall in F.
    destruct (allocate_step N_min (size f) c) as [stay left] eqn:St. cbn [combine] in Hg, Hh.
    assert (forall t i, left <= 0 -> In (t, i) (combine l (allocate N_min (map size l) left)) -> i = size t) as Whole.
    { intros t i Hl. rewrite CC_ALLOCATE_stop by assumption. clear. induction l as [|u l IH]; cbn; [easy|].
      intros [E|E]; [now injection E as <- <-|auto]. }
    destruct Hg as [Hg|Hg], Hh as [Hh|Hh].
    - injection Hg as <- <-. injection Hh as <- <-. destruct L as [L|[_ L]]; [pose proof (ltb_asym _ _ L); congruence|lia].
    - injection Hg as <- <-. unfold allocate_step in St.
      repeat match type of St with context [?a <=? ?b] => destruct (Z.leb_spec a b) end; injection St as <- <-;
        try (now left); right; apply Whole with (2 := Hh); lia.
    - injection Hh as <- <-. apply in_combine_l in Hg. specialize (F g Hg). congruence.
    - eapply IH; eassumption.
  Qed.
End Kept.
