(* Theorems about Blocks.v (PO-BEST-BLOCKS), and about blocks of what is stored (PO-BLOCKS). *)
From Kvspec Require Export SelectionTheorems Blocks.

Lemma in_take {A} k (l : list A) i t : 0 <= i < k -> nth_error l (Z.to_nat i) = Some t -> In t (take k l).
Proof.
  revert k i. induction l as [|x l IH]; intros k i Hi; [now destruct (Z.to_nat i)|]. cbn [take].
  destruct (Z.leb_spec k 0); [lia|]. destruct (Z.eq_dec i 0) as [->|]; [intros [= ->]; now left|].
  replace (Z.to_nat i) with (S (Z.to_nat (i - 1))) by lia. intros E. right. apply (IH (k - 1) (i - 1)); [lia|exact E].
Qed.

Lemma nth_drop {A} k (l : list A) i :
  0 <= k -> 0 <= i -> nth_error (drop k l) (Z.to_nat i) = nth_error l (Z.to_nat (k + i)).
Proof.
  revert k. induction l as [|x l IH]; intros k Hk Hi; cbn [drop]; [now destruct (Z.to_nat i), (Z.to_nat (k + i))|].
  destruct (Z.leb_spec k 0); [now replace k with 0 by lia|]. rewrite IH by lia.
  now replace (Z.to_nat (k + i)) with (S (Z.to_nat (k - 1 + i))) by lia.
Qed.

Section Positions.
  Variable b : Z.
  Hypothesis some : 1 <= b.

  Lemma in_block j x : In x (block_positions b j) <-> x / b = j.
  Proof.
    unfold block_positions. rewrite in_range. split.
    - intros. symmetry. apply Z.div_unique with (x - b * j); lia.
    - intros <-. pose proof (Z.div_mod x b). pose proof (Z.mod_pos_bound x b). lia.
  Qed.

  Lemma in_blocks js x : In x (flat_map (block_positions b) js) <-> In (x / b) js.
  Proof.
    rewrite in_flat_map. split; [intros (j & Hj & Hx); apply in_block in Hx; now subst|].
    intros Hj. exists (x / b). now rewrite in_block.
  Qed.

  Lemma blocks_ascend js : StronglySorted Z.lt js -> StronglySorted Z.lt (flat_map (block_positions b) js).
  Proof.
    induction 1 as [|j l S IH F]; cbn [flat_map]; [constructor|].
    apply StronglySorted_app; [apply range_ascends|exact IH|]. intros x y Hx Hy. apply in_block in Hx.
    apply in_blocks in Hy. rewrite Forall_forall in F. specialize (F _ Hy).
    destruct (Z.lt_ge_cases x y) as [L|L]; [exact L|]. pose proof (Z.div_le_mono y x b). lia.
  Qed.
End Positions.

Section Best.
  Context {R : Type} `{Number R}.
  Variables (b : Z) (tokens : list (option R * bool)).
  Hypothesis some : 1 <= b.

  Let n := count tokens.
  Let blocks := full_blocks b tokens.
  Let chosen B := selected (places b tokens B) blocks.

  (* Tokens of the blocks that are held for a protected one. *)
  Definition held : Z := b * tokens_in (filter pinned blocks).

  Lemma cut : n = b * (n / b) + open_tokens b tokens /\ 0 <= open_tokens b tokens < b /\ 0 <= n / b.
  Proof.
    unfold open_tokens, n. pose proof (count_nonneg tokens). split; [apply Z.div_mod; lia|].
    split; [apply Z.mod_pos_bound; lia|apply Z.div_pos; lia].
  Qed.

  Lemma in_full u : In u blocks <-> exists j, 0 <= j < n / b /\ u = full_block b tokens j.
  Proof.
    unfold blocks, full_blocks. rewrite in_map_iff. split; intros (j & A & C).
    - apply in_range in C. now exists j.
    - exists j. rewrite in_range. now split.
  Qed.

  Lemma laid_blocks : side_by_side 0 blocks.
  Proof.
    unfold blocks, full_blocks, range. rewrite map_map. generalize (Z.to_nat (count tokens / b - 0)) as k.
    enough (forall k i, side_by_side (Z.of_nat i) (map (fun x => full_block b tokens (0 + Z.of_nat x)) (seq i k))) as E
      by (intros k; exact (E k 0%nat)).
    induction k as [|k IH]; intros i; cbn [seq map side_by_side]; [easy|]. split; [|split]; [cbn; lia..|].
    replace (Z.of_nat i + width _) with (Z.of_nat (S i)) by (cbn; lia). apply IH.
  Qed.

  Lemma blocks_one : Forall (fun u => width u = 1) blocks.
  Proof. apply Forall_forall. intros u Hu. now apply in_full in Hu as (j & _ & ->). Qed.

  Lemma blocks_total : tokens_in blocks = n / b.
  Proof.
    assert (tokens_in blocks = count blocks) as ->.
    { unfold tokens_in. pose proof blocks_one as F. clear - F. induction F; cbn [map sum count]; lia. }
    unfold blocks, full_blocks. rewrite count_map, count_range. destruct cut as (_ & _ & ?). fold n. lia.
  Qed.

  Lemma in_chosen B j :
    In j (chosen B) <-> 0 <= j < n / b /\ In (full_block b tokens j) (top_units (places b tokens B) blocks).
  Proof.
    unfold chosen, selected. rewrite in_flat_map. split.
    - intros (u & Hu & Hj). apply in_range in Hj.
      assert (In u blocks) as I.
      { apply (Permutation_in _ (top_units_permutation _ _)) in Hu. eapply chosen_incl, Hu. }
      apply in_full in I as (i & Hi & ->). cbn in Hj. replace j with i by lia. now split.
    - intros (Hj & Hu). exists (full_block b tokens j). split; [assumption|]. apply in_range. cbn. lia.
  Qed.

  Lemma in_best B x : In x (best_blocks b tokens B) <-> In (x / b) (chosen B) \/ n - open_tokens b tokens <= x < n.
  Proof.
    unfold best_blocks. now rewrite in_app_iff, in_range, in_blocks.
  Qed.

  Lemma closed x : 0 <= x / b < n / b <-> 0 <= x < n - open_tokens b tokens.
  Proof.
    destruct cut as (E & Ho & Hn). pose proof (Z.div_mod x b). pose proof (Z.mod_pos_bound x b). nia.
  Qed.

  Theorem PO_BEST_BLOCKS_range B x : In x (best_blocks b tokens B) -> 0 <= x < n.
  Proof.
    rewrite in_best, in_chosen, closed. destruct cut as (E & Ho & Hn). nia.
  Qed.

  (* Positions ascend without repetition. *)
  Theorem PO_BEST_BLOCKS_ascends B : StronglySorted Z.lt (best_blocks b tokens B).
  Proof.
    apply StronglySorted_app; [|apply range_ascends|].
    - eapply blocks_ascend, PO_TOP_UNITS_ascends; [exact some|apply laid_blocks].
    - intros x y Hx Hy. apply in_range in Hy. apply in_blocks, in_chosen in Hx as [Hx _]; [|exact some].
      apply closed in Hx. fold n in Hy. lia.
  Qed.

  (* A block is kept whole or not at all. *)
  Theorem PO_BEST_BLOCKS_whole B x y :
    0 <= x < n -> 0 <= y < n -> x / b = y / b -> In x (best_blocks b tokens B) -> In y (best_blocks b tokens B).
  Proof.
    intros Hx Hy E. rewrite !in_best. rewrite E. intros [K|K]; [now left|right].
    destruct (Z.lt_ge_cases y (n - open_tokens b tokens)) as [L|L]; [|lia].
    assert (0 <= x / b < n / b) as C by (rewrite E; apply closed; lia). apply closed in C. lia.
  Qed.

  Theorem PO_BEST_BLOCKS_open B x : n - open_tokens b tokens <= x < n -> In x (best_blocks b tokens B).
  Proof. rewrite in_best. now right. Qed.

  (* A protected token keeps its whole block. *)
  Theorem PO_BEST_BLOCKS_pinned B x y s :
    nth_error tokens (Z.to_nat x) = Some (s, true) -> 0 <= x < n -> 0 <= y < n -> y / b = x / b ->
    In y (best_blocks b tokens B).
  Proof.
    intros P Hx Hy E. apply in_best. rewrite E.
    destruct (Z.lt_ge_cases x (n - open_tokens b tokens)) as [L|L].
    - left. assert (0 <= x / b < n / b) as C by (apply closed; lia).
      eapply PO_TOP_UNITS_pinned; [apply in_full; now exists (x / b)| |cbn; lia].
      assert (In x (block_positions b (x / b))) as I by now apply in_block.
      apply in_range in I. apply existsb_exists. exists (s, true). split; [|reflexivity].
      replace x with (b * (x / b) + (x - b * (x / b))) in P by lia. rewrite <- nth_drop in P by lia.
      eapply in_take; [|exact P]. lia.
    - right. destruct (Z.lt_ge_cases y (n - open_tokens b tokens)) as [L'|L']; [|lia].
      assert (0 <= x / b < n / b) as C by (rewrite <- E; apply closed; lia). apply closed in C. lia.
  Qed.

  (* Blocks that hold a protected token, else as many as fit, and the open block. *)
  Theorem PO_BEST_BLOCKS_count B :
    count (best_blocks b tokens B) =
      Z.max held (b * Z.min ((B - open_tokens b tokens) / b) (n / b)) + open_tokens b tokens.
  Proof.
    unfold best_blocks. rewrite count_app, count_range, (count_flat_map _ (fun _ => b)).
    2: { apply Forall_forall. intros. unfold block_positions. rewrite count_range. lia. }
    assert (forall l : list Z, sum (map (fun _ => b) l) = b * count l) as ->
      by (induction l as [|? l IH]; cbn [map sum count]; lia).
    fold blocks. rewrite (PO_TOP_UNITS_tokens _ _ laid_blocks _ blocks_one), blocks_total.
    destruct cut as (_ & Ho & Hn). pose proof (safe_nonneg _ _ laid_blocks) as Hs.
    unfold held, places. rewrite <- Z.mul_max_distr_nonneg_l by lia. cbv zeta in *. lia.
  Qed.

  (* At most the share, or what must stay; of more, more than share - b. *)
  Theorem PO_BEST_BLOCKS_share B :
    count (best_blocks b tokens B) <= Z.max B (held + open_tokens b tokens) /\
    (B <= n -> B - b < count (best_blocks b tokens B)).
  Proof.
    rewrite PO_BEST_BLOCKS_count. destruct cut as (E & Ho & Hn). set (r := open_tokens b tokens) in *.
    pose proof (Z.div_mod (B - r) b). pose proof (Z.mod_pos_bound (B - r) b). split; [nia|]. intros HB.
    assert ((B - r) / b <= n / b) by (apply Z.div_le_upper_bound; lia). nia.
  Qed.

  (* Where what must stay takes the share, nothing else stays. *)
  Theorem PO_BEST_BLOCKS_exceeded B x : B <= held + open_tokens b tokens ->
    In x (best_blocks b tokens B) <->
    (0 <= x / b < n / b /\ pinned (full_block b tokens (x / b)) = true) \/ n - open_tokens b tokens <= x < n.
  Proof.
    intros HB. rewrite in_best, in_chosen.
    enough (forall u, In u (top_units (places b tokens B) blocks) <-> In u blocks /\ pinned u = true) as ->.
    { split; (intros [[Hx K]|K]; [left; split; [exact Hx|]|now right]); [apply K|].
      split; [apply in_full; now exists (x / b)|exact K]. }
    assert (places b tokens B <= tokens_in (filter pinned blocks)) as Few.
    { pose proof (safe_nonneg _ _ laid_blocks). unfold places, held in *. cbv zeta in *.
      apply Z.max_lub; [assumption|apply Z.div_le_upper_bound; lia]. }
    intros u. rewrite <- filter_In. pose proof (top_units_permutation blocks (places b tokens B)) as P.
    cbv beta in P. rewrite fit_nothing in P by (apply (others_wide _ _ laid_blocks) || lia).
    rewrite app_nil_r in P. split; apply Permutation_in; [exact P|exact (Permutation_sym P)].
  Qed.

  (* A larger share keeps what a smaller one keeps. *)
  Theorem PO_BEST_BLOCKS_nested B B' : B <= B' -> incl (best_blocks b tokens B) (best_blocks b tokens B').
  Proof.
    intros HB x. rewrite !in_best. intros [K|K]; [left|now right]. eapply PO_TOP_UNITS_nested; [|exact K].
    pose proof (Z.div_le_mono (B - open_tokens b tokens) (B' - open_tokens b tokens) b). unfold places. lia.
  Qed.

  (* A block that stays though nothing protects it has a higher sum than one that goes, or an equal one and is lower. *)
  Theorem PO_BEST_BLOCKS_preferred `{!Ordered R} B i j (u := full_block b tokens i) (v := full_block b tokens j) :
    0 <= i < n / b -> 0 <= j < n / b -> pinned u = false ->
    In (b * i) (best_blocks b tokens B) -> ~ In (b * j) (best_blocks b tokens B) ->
    higher (value u) (value v) = true \/ (higher (value v) (value u) = false /\ i <= j).
  Proof.
    assert (forall k, b * k / b = k) as E by (intros k; rewrite Z.mul_comm; apply Z.div_mul; lia).
    assert (forall k, 0 <= k < n / b -> In (b * k) (best_blocks b tokens B) <->
      In (full_block b tokens k) (top_units (places b tokens B) blocks)) as In_top.
    { intros k Hk. rewrite in_best, in_chosen, E. rewrite <- (E k), closed in Hk. rewrite <- closed, E in *.
      assert (b * k < n - open_tokens b tokens) by (apply closed; now rewrite E). intuition lia. }
    intros Hi Hj P. rewrite !In_top by assumption. intros Ki Kj.
    apply (PO_TOP_UNITS_preferred blocks (places b tokens B)); try assumption. apply in_full. now exists j.
  Qed.
End Best.

Definition single {R} (token : Z * (option R * bool)) : unit_of R :=
  let '(i, (x, p)) := token in {| first := i; width := 1; value := x; pinned := p |}.

Lemma in_numbered {A} (l : list A) : forall s i t, In (i, t) (numbered s l) -> s <= i /\ take 1 (drop (i - s) l) = [t].
Proof.
  induction l as [|x l IH]; intros s i t; [easy|]. cbn [numbered]. intros [[= <- <-]|I].
  - rewrite Z.sub_diag. cbn. split; [lia|]. now destruct l.
  - apply IH in I as [L E]. split; [lia|]. cbn [drop]. destruct (Z.leb_spec (i - s) 0); [lia|].
    now replace (i - s - 1) with (i - (s + 1)) by lia.
Qed.

(* Blocks of one token are single tokens. *)
Theorem PO_BEST_BLOCKS_of_one (tokens : list (option Q * bool)) B :
  best_blocks 1 tokens B = selected (Z.max 0 B) (map single (numbered 0 tokens)).
Proof.
  unfold best_blocks, places, open_tokens. rewrite Z.mod_1_r, !Z.sub_0_r, Z.div_1_r.
  replace (range (count tokens) (count tokens)) with (@nil Z) by (unfold range; now rewrite Z.sub_diag).
  rewrite app_nil_r.
  replace (full_blocks 1 tokens) with (map single (numbered 0 tokens)).
  - induction (selected _ _) as [|j l IH]; [reflexivity|]. cbn [flat_map]. rewrite IH. unfold block_positions, range.
    rewrite Z.mul_1_l. replace (j + 1 - j) with 1 by lia. change (Z.to_nat 1) with 1%nat. cbn [seq map app].
    now rewrite Z.add_0_r.
  - unfold full_blocks. rewrite Z.div_1_r, <- (Z.add_0_l (count tokens)), <- numbered_fst, map_map. apply map_ext_in.
    intros (i & x & p) I. apply in_numbered in I as [_ E]. rewrite Z.sub_0_r in E.
    unfold full_block. cbn [fst]. rewrite Z.mul_1_l, E. destruct x as [[a d]|]; cbn; rewrite orb_false_r;
      [unfold Qplus; cbn; now rewrite Z.mul_1_r|reflexivity].
Qed.

(* The sum of a block is that of Conventions; without one of its scores it has none, and comes last. *)
Theorem PO_BEST_BLOCKS_sum {R} `{Number R} (xs : list R) : block_score (map Some xs) = Some (total xs).
Proof.
  unfold block_score, total. generalize zero. induction xs as [|x xs IH]; intros sum; cbn; [reflexivity|apply IH].
Qed.

Theorem PO_BEST_BLOCKS_no_score {R} `{Number R} (scores : list (option R)) :
  In None scores -> block_score scores = None.
Proof.
  unfold block_score. generalize (Some zero). induction scores as [|x scores IH]; intros sum I; [easy|].
  cbn [fold_left]. destruct I as [->|I]; [|now apply IH]. clear IH. destruct sum; induction scores; auto.
Qed.

(* What is stored when every decision is by blocks: full blocks of the text, and the tokens of its open block. *)
Definition in_whole_blocks (b seen : Z) (stored : list Z) : Prop :=
  exists js, stored = flat_map (block_positions b) js ++ range (seen - seen mod b) seen.

Section Stored.
  Variables b seen : Z.
  Hypotheses (some : 1 <= b) (seen_some : 0 <= seen).

  Lemma nth_range i c d : 0 <= i < d - c -> nth (Z.to_nat i) (range c d) 0 = c + i.
  Proof.
    intros Hi. unfold range. rewrite (nth_indep _ 0 (c + Z.of_nat 0)) by (rewrite map_length, seq_length; lia).
    rewrite (map_nth (fun i => c + Z.of_nat i)), seq_nth by lia. lia.
  Qed.

  Lemma length_range c d : length (range c d) = Z.to_nat (d - c).
  Proof. unfold range. now rewrite map_length, seq_length. Qed.

  Lemma nth_block rest js : forall i t, 0 <= i < count js -> 0 <= t < b ->
    nth (Z.to_nat (b * i + t)) (flat_map (block_positions b) js ++ rest) 0 = b * nth (Z.to_nat i) js 0 + t.
  Proof.
    induction js as [|j js IH]; intros i t Hi Ht; cbn [count flat_map] in *; [lia|]. rewrite <- app_assoc.
    destruct (Z.eq_dec i 0) as [->|].
    - rewrite app_nth1 by (unfold block_positions; rewrite length_range; lia).
      rewrite Z.mul_0_r. unfold block_positions. rewrite nth_range by lia. reflexivity.
    - rewrite app_nth2; unfold block_positions at 1; rewrite length_range; [|nia].
      replace (Z.to_nat (b * i + t) - _)%nat with (Z.to_nat (b * (i - 1) + t)) by nia. rewrite IH by lia.
      now replace (Z.to_nat i) with (S (Z.to_nat (i - 1))) by lia.
  Qed.

  Lemma map_range f a c k : (forall t, 0 <= t < k -> f (a + t) = c + t) -> map f (range a (a + k)) = range c (c + k).
  Proof.
    intros F. unfold range. replace (a + k - a) with k by lia. replace (c + k - c) with k by lia. rewrite map_map.
    apply map_ext_in. intros i Hi. apply in_seq in Hi. apply F. lia.
  Qed.

  Lemma count_blocks js : count (flat_map (block_positions b) js) = b * count js.
  Proof.
    induction js as [|j js IH]; cbn [flat_map count]; [lia|]. rewrite count_app, IH. unfold block_positions.
    rewrite count_range. lia.
  Qed.

  (* A block of what is stored is a block of the text: after a decision, *)
  Theorem PO_BLOCKS_decision {R} `{Number R} (tokens : list (option R * bool)) stored B :
    count tokens = count stored -> in_whole_blocks b seen stored ->
    in_whole_blocks b seen (map (fun i => nth (Z.to_nat i) stored 0) (best_blocks b tokens B)).
  Proof.
    intros E (js & ->). pose proof (Z.mod_pos_bound seen b ltac:(lia)) as Hr. set (r := seen mod b) in *.
    pose proof (count_nonneg js). rewrite count_app, count_blocks, count_range in E.
    assert (open_tokens b tokens = r) as O by (symmetry; apply Z.mod_unique with (count js); lia).
    assert (count tokens / b = count js) as D by (symmetry; apply Z.div_unique with r; lia).
    unfold best_blocks. set (chosen := selected _ _). exists (map (fun j => nth (Z.to_nat j) js 0) chosen).
    rewrite map_app. f_equal.
    - assert (Forall (fun j => 0 <= j < count js) chosen) as F.
      { apply Forall_forall. intros j Hj. apply in_chosen in Hj as [Hj _]; lia. }
      induction F as [|j l Hj F IH]; [reflexivity|]. cbn [flat_map map]. rewrite map_app, IH. f_equal.
      apply map_range. intros. now apply nth_block.
    - rewrite O. replace (count tokens) with (count tokens - r + r) at 2 by lia.
      replace seen with (seen - r + r) at 3 by lia.
      apply map_range. intros t Ht. pose proof (count_blocks js) as L. rewrite count_length in L.
      rewrite app_nth2 by lia. replace (Z.to_nat _ - _)%nat with (Z.to_nat t) by lia. apply nth_range. lia.
  Qed.

  (* and when the tokens of a turn or of a step follow. *)
  Theorem PO_BLOCKS_append stored k : 0 <= k ->
    in_whole_blocks b seen stored -> in_whole_blocks b (seen + k) (stored ++ range seen (seen + k)).
  Proof.
    intros Hk (js & ->). exists (js ++ range (seen / b) ((seen + k) / b)). rewrite flat_map_app, <- !app_assoc. f_equal.
    pose proof (Z.div_mod seen b). pose proof (Z.mod_pos_bound seen b).
    pose proof (Z.div_mod (seen + k) b). pose proof (Z.mod_pos_bound (seen + k) b).
    pose proof (Z.div_le_mono seen (seen + k) b).
    assert (StronglySorted Z.lt (range (seen - seen mod b) seen ++ range seen (seen + k))) as S.
    { apply StronglySorted_app; [apply range_ascends..|]. intros x y. rewrite !in_range. lia. }
    assert (StronglySorted Z.lt (flat_map (block_positions b) (range (seen / b) ((seen + k) / b)) ++
      range (seen + k - (seen + k) mod b) (seen + k))) as S'.
    { apply StronglySorted_app; [apply blocks_ascend, range_ascends; lia|apply range_ascends|].
      intros x y. rewrite in_blocks, !in_range by lia. intros. pose proof (Z.div_mod x b).
      pose proof (Z.mod_pos_bound x b). nia. }
    apply (ascending_unique (fun x => x)); [assumption..|].
    apply NoDup_Permutation; [now apply ascending_NoDup..|]. intros x. rewrite !in_app_iff, in_blocks, !in_range by lia.
    pose proof (Z.div_mod x b). pose proof (Z.mod_pos_bound x b). nia.
  Qed.
End Stored.
