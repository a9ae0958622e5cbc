(* CC-DISSOLVE in one formula, and a second eviction of what the first one left. *)
From Kvspec Require Export KeptTheorems.

Section Counts.
  Context {R : Type} `{Number R}.
  Variables (N_min : Z) (s : Z) (all : list (trunk R)).
  Hypothesis laid : laid_out s all.

  Let alive := sort goes_before (filter (fun g : trunk R => negb (safe g)) all).
  Let alive_stay B := allocate N_min (map size alive) (cut (safe_tokens all) (tokens_of alive) B).
  Let pairs B := combine alive (alive_stay B) ++ map (fun g => (g, size g)) (filter safe all).

  (* The tokens of the unprotected trunks that go before g: the lower score, of equal ones the lower trunk. *)
  Definition going_before (g : trunk R) : Z :=
    sum (map size (filter (fun h : trunk R => ltb (score h) (score g) || (negb (ltb (score g) (score h)) && (start h <? start g)))
                          (filter (fun h : trunk R => negb (safe h)) all))).

  (* How many tokens of g stay: what of the cut is left for it is `cut - going_before`. *)
  Definition staying (B : Z) (g : trunk R) : Z :=
    let left := cut (safe_tokens all) (tokens_of all - safe_tokens all) B - going_before g in
    if safe g then size g
    else if left <=? 0 then size g
    else if Z.max N_min 1 <=? size g - left then size g - left
    else 0.

  Lemma in_closed_form c : forall (l : list (trunk R)) g k r b, NoDup (map start (l ++ g :: r)) ->
    In (g, k) (combine (l ++ g :: r) (closed_form N_min b c (map size (l ++ g :: r)))) <->
    k = if c <=? b + tokens_of l then size g
        else if Z.max N_min 1 <=? size g - (c - (b + tokens_of l)) then size g - (c - (b + tokens_of l)) else 0.
  Proof.
    unfold tokens_of. induction l as [|h l IH]; intros g k r b N; cbn [app map sum closed_form combine In].
    - rewrite Z.add_0_r. split; [|intros ->; now left]. intros [E|I]; [now injection E|].
      apply in_combine_l in I. inversion N as [|? ? Out _]; subst. exfalso. now apply Out, in_map.
    - inversion N as [|? ? Out N']; subst. rewrite (IH g k r (b + size h) N'), Z.add_assoc. split; [|now right].
      intros [E|I]; [|assumption]. injection E as -> _. exfalso. apply Out. rewrite map_app. apply in_or_app. right. now left.
  Qed.

  Lemma starts_distinct : NoDup (map start all).
  Proof.
    pose proof (laid_out_ascends all s laid) as S. pose proof (all_sizes N_min s all laid) as F. clear - S F.
    induction S as [|g l S IH G]; cbn; constructor; inversion F; subst; [|now apply IH].
    intros I. apply in_map_iff in I as (h & E & Hh). rewrite Forall_forall in G. specialize (G h Hh). lia.
  Qed.

  (* How many tokens of which trunk stay, in one formula. *)
  Theorem CC_DISSOLVE_counts `{!Ordered R} B g k : In (g, k) (stays N_min B all) <-> In g all /\ k = staying B g.
  Proof.
    assert (forall g, In g all -> safe g = false -> In (g, staying B g) (pairs B)
            /\ forall k, In (g, k) (combine alive (alive_stay B)) -> k = staying B g) as Alive.
    { clear g k. intros g Hg Sg. set (others := filter (fun h : trunk R => negb (safe h)) all).
      assert (NoDup (map start others)) as N.
      { pose proof starts_distinct as D. unfold others. clear - D. induction all as [|h l IH]; cbn; [constructor|].
        inversion D as [|? ? Out D']; subst. destruct (safe h); cbn; [now apply IH|]. constructor; [|now apply IH].
        intros I. apply Out. apply in_map_iff in I as (f & <- & Hf). apply filter_In in Hf as [Hf _]. now apply in_map. }
      assert (In g others) as Ho by (apply filter_In; split; [assumption|now rewrite Sg]).
      destruct (sorted_split (fun h f : trunk R => ltb (score h) (score f)) start) with (all := others) (x := g)
        as (l & r & E & P); [intros; now apply ltb_asym|intros; now apply ltb_cotrans|assumption..|].
      assert (forall k, In (g, k) (combine alive (alive_stay B)) <-> k = staying B g) as K.
      { intros k. unfold alive_stay. rewrite <- CC_ALLOCATE_closed_form by exact (alive_positive N_min s all laid).
        assert (NoDup (map start (l ++ g :: r))) as D.
        { rewrite <- E. eapply Permutation_NoDup; [|exact N]. apply Permutation_map, Permutation_sym, sort_permutation. }
        change alive with (sort (ties_by_place (fun h f : trunk R => ltb (score h) (score f)) start) others). rewrite E.
        rewrite in_closed_form by assumption. rewrite <- E. change (sort _ others) with alive.
        destruct (alive_tokens all) as [T _]. fold alive in T. replace (tokens_of alive) with (tokens_of all - safe_tokens all) by lia.
        unfold tokens_of at 2 4 6. rewrite (sum_permutation _ _ (Permutation_map size P)).
        unfold staying. rewrite Sg. unfold going_before, earlier. fold others.
        set (c := cut _ _ _). set (b := sum _). replace (0 + b) with b by lia.
        destruct (Z.leb_spec c b), (Z.leb_spec (c - b) 0); try lia; reflexivity. }
      split; [|intros k Hk; now apply K]. unfold pairs. apply in_or_app. left. now apply K. }
    assert (In (g, k) (stays N_min B all) <-> In (g, k) (pairs B)) as ->.
    { split; apply Permutation_in; [|apply Permutation_sym]; apply stays_permutation. }
    split.
    - intros I. assert (In g all) as Hg.
      { apply (Permutation_in _ (pairs_fst N_min all B)). change g with (fst (g, k)). now apply in_map. }
      split; [assumption|]. unfold pairs in I. apply in_app_or in I as [I|I].
      + pose proof I as J. apply in_combine_l in J. unfold alive in J. apply in_sort, filter_In in J as [_ J].
        apply negb_true_iff in J. now apply (Alive g Hg J).
      + apply in_map_iff in I as (f & E & Hf). injection E as <- <-. apply filter_In in Hf as [_ Sf]. unfold staying. now rewrite Sf.
    - intros [Hg ->]. destruct (safe g) eqn:Sg; [|now apply Alive]. unfold pairs, staying. rewrite Sg. apply in_or_app. right.
      apply in_map_iff. exists g. split; [reflexivity|]. now apply filter_In.
  Qed.

  (* What is kept: of each trunk the members before which fewer come than stay of it. Since kept positions ascend
     (CC_DISSOLVE_ascends), this is the one such list. *)
  Theorem CC_DISSOLVE_kept `{!Ordered R} B x : In x (kept N_min B all) <->
    exists g M, In g all /\ In (x, M) (numbered (start g) (members g)) /\ stronger g x M < staying B g.
  Proof.
    unfold kept. rewrite in_flat_map. split.
    - intros ([g k] & I & K). apply CC_DISSOLVE_counts in I as [Hg ->]. pose proof (kept_members_in _ _ _ K) as Hx.
      assert (In x (map fst (numbered (start g) (members g)))) as Hm by (rewrite numbered_fst; now apply in_range).
      apply in_map_iff in Hm as ([y M] & <- & Hm). exists g, M. repeat split; [assumption..|]. now apply CC_DISSOLVE_members with (M := M) in K.
    - intros (g & M & Hg & Hx & L). exists (g, staying B g). split; [now apply CC_DISSOLVE_counts|].
      now apply (CC_DISSOLVE_members g _ x M Hx).
  Qed.

  (* The same trunks, but that the score of the one that starts where g does is another. *)
  Definition rescored (g : trunk R) (score' : R) (h : trunk R) : trunk R :=
    if start h =? start g
    then {| start := start h; members := members h; score := score'; strength := strength h; safe := safe h |} else h.

  Lemma rescored_size g x h : size (rescored g x h) = size h.
  Proof. unfold rescored. now destruct (start h =? start g). Qed.

  Lemma rescored_tokens g x l : tokens_of (map (rescored g x) l) = tokens_of l.
  Proof. unfold tokens_of. rewrite map_map. f_equal. apply map_ext. apply rescored_size. Qed.

  Lemma rescored_safe g x l : filter safe (map (rescored g x) l) = map (rescored g x) (filter safe l).
  Proof.
    induction l as [|h l IH]; cbn; [reflexivity|]. assert (safe (rescored g x h) = safe h) as ->.
    { unfold rescored. now destruct (start h =? start g). }
    destruct (safe h); cbn; now rewrite IH.
  Qed.
End Counts.

(* A trunk whose own score rises keeps no fewer tokens. *)
Theorem CC_DISSOLVE_a_higher_score_keeps_more {R} `{Ordered R} N_min s (all : list (trunk R)) B g score' :
  laid_out s all -> In g all -> ltb score' (score g) = false ->
  staying N_min all B g <= staying N_min (map (rescored g score') all) B (rescored g score' g).
Proof.
  intros L Hg Up.
  assert (forall h, In h all -> start h = start g -> h = g) as One.
  { pose proof (starts_distinct N_min s all L) as N. clear - N Hg. induction all as [|f l IH]; [easy|]. cbn in N.
    inversion N as [|? ? Out N']; subst. intros h [<-|Hh] E; destruct Hg as [<-|Hg]; try reflexivity; [| |now apply IH];
      exfalso; apply Out; [rewrite E|rewrite <- E]; now apply in_map. }
  assert (rescored g score' g = {| start := start g; members := members g; score := score'; strength := strength g; safe := safe g |}) as G
    by (unfold rescored; now rewrite Z.eqb_refl).
  assert (going_before all g <= going_before (map (rescored g score') all) (rescored g score' g)) as More.
  { clear L Hg. rewrite G. unfold going_before. cbn [start score].
    induction all as [|h l IH]; cbn [map filter sum]; [lia|]. specialize (IH (fun f Hf => One f (or_intror Hf))).
    assert (safe (rescored g score' h) = safe h) as -> by (unfold rescored; now destruct (start h =? start g)).
    destruct (safe h); cbn [negb filter]; [exact IH|]. assert (0 <= size h) as P by apply count_nonneg.
    pose proof (rescored_size g score' h) as Sz. destruct (Z.eqb_spec (start h) (start g)) as [E|E].
    - assert (ltb (score g) (score g) = false) as Irr.
      { destruct (ltb (score g) (score g)) eqn:T; [|reflexivity]. pose proof (ltb_asym _ _ T). congruence. }
      rewrite (One h (or_introl eq_refl) E) in *. rewrite Irr, Z.ltb_irrefl. cbn [negb andb orb].
      destruct (_ || _); cbn [map sum]; lia.
    - assert (rescored g score' h = h) as Same by (unfold rescored; now apply Z.eqb_neq in E as ->). rewrite Same.
      destruct (ltb (score h) (score g) || (negb (ltb (score g) (score h)) && (start h <? start g))) eqn:T.
      + assert (ltb (score h) score' || (negb (ltb score' (score h)) && (start h <? start g)) = true) as ->.
        { apply orb_true_iff. apply orb_true_iff in T as [T|T].
          - left. destruct (ltb_cotrans (score h) score' (score g) T); congruence.
          - apply andb_true_iff in T as [T Lt]. apply negb_true_iff in T. right. rewrite Lt, andb_true_r. apply negb_true_iff.
            destruct (ltb score' (score h)) eqn:X; [|reflexivity]. destruct (ltb_cotrans score' (score g) (score h) X); congruence. }
        cbn [map sum]. lia.
      + destruct (ltb (score h) score' || (negb (ltb score' (score h)) && (start h <? start g))); cbn [map sum]; [|exact IH]. lia. }
  unfold staying. assert (safe_tokens (map (rescored g score') all) = safe_tokens all) as ->.
  { unfold safe_tokens. now rewrite rescored_safe, rescored_tokens. }
  rewrite rescored_tokens, rescored_size. replace (safe (rescored g score' g)) with (safe g) by now rewrite G.
  destruct (safe g); [lia|]. set (c := cut _ _ _). assert (0 <= size g) by apply count_nonneg.
  repeat match goal with |- context [?a <=? ?b] => destruct (Z.leb_spec a b) end; lia.
Qed.

(* Budget 1, or any B of at least n: nothing is evicted. *)
Theorem CC_DISSOLVE_no_op {R} `{Number R} N_min s B (all : list (trunk R)) :
  laid_out s all -> tokens_of all <= B -> kept N_min B all = range s (s + tokens_of all).
Proof.
  intros L HB. apply (ascending_unique (fun x => x)); [now apply (CC_DISSOLVE_ascends N_min s)|apply range_ascends|].
  apply NoDup_Permutation_bis.
  - now apply ascending_NoDup, (CC_DISSOLVE_ascends N_min s).
  - pose proof (CC_DISSOLVE_size N_min s all L B) as [S _]. specialize (S HB).
    pose proof (count_range s (s + tokens_of all)) as C. rewrite !count_length in *.
    assert (0 <= tokens_of all) by (apply sum_nonneg, Forall_map, Forall_forall; intros; apply count_nonneg). lia.
  - intros x Hx. apply in_range. now apply (CC_DISSOLVE_inside N_min s all L B).
Qed.

(* ---- a second eviction ---- *)

Section Again.
  Context {R : Type} `{Number R}.
  Variables (N_min s : Z) (all : list (trunk R)).
  Hypothesis laid : laid_out s all.

  (* The trunks that are left, in slots side by side: of each its kept members, in their order. *)
  Definition kept_impacts (g : trunk R) (k : Z) : list R :=
    map snd (sort (fun i j => fst i <=? fst j) (take k (sort stays_before (numbered (start g) (members g))))).

  Fixpoint left_over (slot : Z) (decided : list (trunk R * Z)) : list (trunk R) :=
    match decided with
    | [] => []
    | (g, k) :: rest =>
        if k =? 0 then left_over slot rest
        else {| start := slot; members := kept_impacts g k; score := score g; strength := weakened g k; safe := safe g |}
             :: left_over (slot + k) rest
    end.

  Lemma kept_impacts_count g k : 0 <= k <= size g -> count (kept_impacts g k) = k.
  Proof.
    intros Hk. rewrite <- (kept_members_count g k Hk) at 2. unfold kept_impacts, kept_members. now rewrite !count_map.
  Qed.

  Lemma left_over_laid decided : Forall (fun p => 0 <= snd p <= size (fst p)) decided ->
    forall slot, laid_out slot (left_over slot decided)
    /\ tokens_of (left_over slot decided) = sum (map snd decided)
    /\ safe_tokens (left_over slot decided) = sum (map snd (filter (fun p => safe (fst p)) decided)).
  Proof.
    unfold safe_tokens, tokens_of.
    induction 1 as [|[g k] decided Hk F IH]; intros slot; cbn [left_over map filter sum fst snd] in *; [now repeat split|].
    destruct (Z.eqb_spec k 0) as [->|N].
    - destruct (IH slot) as (L & T & P). repeat split; [assumption|lia|]. destruct (safe g); cbn [map sum snd]; lia.
    - destruct (IH (slot + k)) as (L & T & P).
      assert (size {| start := slot; members := kept_impacts g k; score := score g; strength := weakened g k; safe := safe g |} = k) as E
        by (unfold size; cbn [members]; now apply kept_impacts_count).
      cbn [laid_out map sum filter start safe]. rewrite !E. repeat split; [lia|assumption|lia|].
      destruct (safe g); cbn [map sum snd]; rewrite ?E; lia.
  Qed.

  Lemma stays_safe B : Forall (fun p => safe (fst p) = true -> snd p = size (fst p)) (stays N_min B all).
  Proof.
    apply (Permutation_Forall (Permutation_sym (stays_permutation N_min all B))), Forall_app. split.
    - apply Forall_forall. intros [g k] I Sg. apply in_combine_l, in_sort, filter_In in I as [_ I]. cbn in *. now rewrite Sg in I.
    - apply Forall_map, Forall_forall. reflexivity.
  Qed.

  (* Evicting what is left to the same B, the same trunks protected, evicts nothing. *)
  Theorem CC_DISSOLVE_idempotent B :
    kept N_min B (left_over 0 (stays N_min B all)) = range 0 (count (kept N_min B all)).
  Proof.
    destruct (left_over_laid _ (stays_within N_min s all laid B) 0) as (L' & T & P).
    rewrite <- (kept_count N_min s all laid B) in T.
    assert (safe_tokens (left_over 0 (stays N_min B all)) = safe_tokens all) as E.
    { rewrite P. unfold safe_tokens, tokens_of.
      transitivity (sum (map size (filter safe (map fst (stays N_min B all))))); [|now rewrite (CC_DISSOLVE_every_trunk N_min s)].
      pose proof (stays_safe B) as F. clear T P L'. induction F as [|[g k] l Hk F IH]; cbn [map filter fst snd] in *; [reflexivity|].
      destruct (safe g) eqn:Sg; cbn [map sum snd]; [rewrite Hk, IH by reflexivity; reflexivity|assumption]. }
    rewrite <- T, <- (Z.add_0_l (tokens_of _)). set (left := left_over 0 (stays N_min B all)) in *.
    destruct (Z_le_gt_dec (tokens_of left) B) as [Fits|Over]; [now apply CC_DISSOLVE_no_op|].
    pose proof (CC_DISSOLVE_budget N_min s all laid B) as M.
    apply (ascending_unique (fun x => x)); [now apply (CC_DISSOLVE_ascends N_min 0)|apply range_ascends|].
    apply NoDup_Permutation_bis.
    - now apply ascending_NoDup, (CC_DISSOLVE_ascends N_min 0).
    - pose proof (CC_DISSOLVE_size N_min 0 left L' B) as (_ & S & _). specialize (S ltac:(lia)).
      pose proof (count_range 0 (0 + tokens_of left)) as C. rewrite !count_length in *.
      assert (0 <= tokens_of left) by (apply sum_nonneg, Forall_map, Forall_forall; intros; apply count_nonneg). lia.
    - intros x Hx. apply in_range. now apply (CC_DISSOLVE_inside N_min 0 left L' B).
  Qed.

  (* Where stored positions have gaps, trunks are laid out in slots, and the kept slots are read as positions: those
     ascend, are stored, and are as many. *)
  Definition at_slots (positions slots : list Z) : list Z := map (fun i => nth (Z.to_nat i) positions 0) slots.

  Theorem CC_DISSOLVE_with_gaps positions B : s = 0 -> tokens_of all = count positions -> StronglySorted Z.lt positions ->
    let kept_positions := at_slots positions (kept N_min B all) in
    StronglySorted Z.lt kept_positions /\ incl kept_positions positions /\ count kept_positions = count (kept N_min B all).
  Proof.
    intros S0 T S. unfold at_slots.
    assert (forall x, In x (kept N_min B all) -> (0 <= x /\ (Z.to_nat x < length positions)%nat)) as I.
    { intros x Hx. apply (CC_DISSOLVE_inside N_min s all laid) in Hx. rewrite T, count_length in Hx. lia. }
    assert (forall i j, (i < j < length positions)%nat -> nth i positions 0 < nth j positions 0) as Up.
    { clear - S. induction S as [|p l S IH F]; intros [|i] [|j] Hij; cbn in *; try lia.
      - rewrite Forall_forall in F. apply F, nth_In. lia.
      - apply IH. lia. }
    split; [|split; [|apply count_map]].
    - pose proof (CC_DISSOLVE_ascends N_min s all laid B) as A. induction A as [|x l A IH F]; cbn; constructor.
      + apply IH. intros; apply I. now right.
      + apply Forall_map. rewrite Forall_forall in *. intros y Hy. specialize (F y Hy).
        pose proof (I x (or_introl eq_refl)). pose proof (I y (or_intror Hy)). apply Up. lia.
    - intros p Hp. apply in_map_iff in Hp as (x & <- & Hx). apply nth_In. now apply I.
  Qed.
End Again.

(* ---- ratios ---- *)

(* Over the rationals: r times the size is the count; D falls in proportion. *)
Section Weakening.
  Variables (N_min s B : Z) (all : list (trunk Q)) (g : trunk Q) (k : Z).
  Hypotheses (laid : laid_out s all) (decided : In (g, k) (stays N_min B all)).

  Lemma decided_bounds : 0 <= k <= size g /\ 1 <= size g.
  Proof.
    pose proof (stays_within N_min s all laid B) as W. rewrite Forall_forall in W. split; [exact (W _ decided)|].
    pose proof (all_sizes N_min s all laid) as F. rewrite Forall_forall in F. apply F.
    rewrite <- (CC_DISSOLVE_every_trunk N_min s all laid B). now apply (in_map fst) in decided.
  Qed.

  Theorem CC_ALLOCATE_ratio : (ratio g k * inject_Z (size g) == inject_Z k)%Q
    /\ ((ratio g k == 0)%Q <-> k = 0) /\ ((ratio g k == 1)%Q <-> k = size g) /\ (0 <= ratio g k <= 1)%Q.
  Proof.
    destruct decided_bounds as [Hk Hs]. unfold ratio. cbn [over of_Z rational].
    assert (~ inject_Z (size g) == 0)%Q as NZ by (unfold Qeq; cbn; lia).
    assert (0 < inject_Z (size g))%Q as P by (change 0%Q with (inject_Z 0); rewrite <- Zlt_Qlt; lia).
    assert (inject_Z k / inject_Z (size g) * inject_Z (size g) == inject_Z k)%Q as E by (field; assumption).
    split; [exact E|]. repeat split.
    - intros Z0. rewrite Z0, Qmult_0_l in E. unfold Qeq in E. cbn in E. lia.
    - intros ->. unfold Qdiv. apply Qmult_0_l.
    - intros O. rewrite O, Qmult_1_l in E. unfold Qeq in E. cbn in E. lia.
    - intros ->. field. assumption.
    - apply Qle_shift_div_l; [assumption|]. rewrite Qmult_0_l. change 0%Q with (inject_Z 0). rewrite <- Zle_Qle. lia.
    - apply Qle_shift_div_r; [assumption|]. rewrite Qmult_1_l, <- Zle_Qle. lia.
  Qed.

  (* Equation 34, its three cases. *)
  Theorem CC_DISSOLVE_D_cases : (k = 0 -> (weakened g k == 0)%Q) /\ (k = size g -> (weakened g k == strength g)%Q)
    /\ (weakened g k * inject_Z (size g) == inject_Z k * strength g)%Q.
  Proof.
    destruct CC_ALLOCATE_ratio as (E & E0 & E1 & _). unfold weakened. cbn [times rational]. repeat split.
    - intros K. apply E0 in K. rewrite K. apply Qmult_0_l.
    - intros K. apply E1 in K. rewrite K. apply Qmult_1_l.
    - rewrite <- E. ring.
  Qed.

  (* Equation 33 of the ratio that Equation 32 gave is the count that stays of a partial trunk. *)
  Theorem CC_KEEP_COUNT_of_the_ratio : 0 < k < size g -> safe g = false -> keep_count (ratio g k) (size g) N_min = k.
  Proof.
    intros Hk Sg. pose proof decided_bounds. unfold ratio. cbn [over of_Z rational]. apply keep_count_of_ratio; [|lia].
    pose proof (CC_DISSOLVE_counts N_min s all laid B g k) as [C _]. destruct (C decided) as [_ E]. unfold staying in E.
    rewrite Sg in E. repeat match type of E with context [?a <=? ?b] => destruct (Z.leb_spec a b) end; lia.
  Qed.
End Weakening.
