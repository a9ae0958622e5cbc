(* Theorems about Selection.v (PO-TOP-UNITS). *)
From Kvspec Require Export Ranks Selection.

Fixpoint side_by_side {R} (s : Z) (units : list (unit_of R)) : Prop :=
  match units with
  | [] => True
  | u :: rest => first u = s /\ 1 <= width u /\ side_by_side (s + width u) rest
  end.

Definition tokens_in {R} (units : list (unit_of R)) : Z := sum (map width units).

Section Fit.
  Context {R : Type}.

  Lemma fit_prefix (order : list (unit_of R)) : forall room,
    exists rest, order = while_they_fit room order ++ rest.
  Proof.
    induction order as [|u order IH]; intros room; cbn; [now exists []|].
    destruct (width u <=? room); [|now exists (u :: order)].
    destruct (IH (room - width u)) as [rest E]. exists rest. cbn. now rewrite <- E.
  Qed.

  Lemma fit_room (order : list (unit_of R)) : forall room,
    0 <= room -> tokens_in (while_they_fit room order) <= room.
  Proof.
    unfold tokens_in. induction order as [|u order IH]; intros room Hr; cbn; [lia|].
    destruct (Z.leb_spec (width u) room); cbn; [specialize (IH (room - width u))|]; lia.
  Qed.

  (* Without room nothing is taken, since no unit is empty. *)
  Lemma fit_nothing (order : list (unit_of R)) room :
    Forall (fun u => 1 <= width u) order -> room <= 0 -> while_they_fit room order = [].
  Proof. destruct 1 as [|u order Hu F]; cbn; [reflexivity|]. intros. destruct (Z.leb_spec (width u) room); [lia|reflexivity]. Qed.

  (* Units of one token fill the room, or are all taken. *)
  Lemma fit_tokens (order : list (unit_of R)) : forall room,
    Forall (fun u => width u = 1) order -> while_they_fit room order = take room order.
  Proof.
    induction order as [|u order IH]; intros room F; cbn; [reflexivity|]. inversion F as [|? ? E F']; subst. rewrite E.
    destruct (Z.leb_spec 1 room), (Z.leb_spec room 0); try lia; [|reflexivity]. now rewrite IH.
  Qed.

  Lemma fit_monotone (order : list (unit_of R)) : forall room room',
    room <= room' -> incl (while_they_fit room order) (while_they_fit room' order).
  Proof.
    induction order as [|u order IH]; intros room room' Hr; cbn; [easy|].
    destruct (Z.leb_spec (width u) room); [|easy]. destruct (Z.leb_spec (width u) room'); [|lia].
    intros v [<-|Hv]; [now left|right]. eapply IH; [|exact Hv]. lia.
  Qed.
End Fit.

Section Selection.
  Context {R : Type} `{Number R}.
  Variables (s : Z) (units : list (unit_of R)).
  Hypothesis laid : side_by_side s units.

  Let safe := filter pinned units.
  Let others := sort preferred (filter (fun u : unit_of R => negb (pinned u)) units).
  Let chosen B := safe ++ while_they_fit (B - tokens_in safe) others.

  Lemma top_units_permutation B : Permutation (top_units B units) (chosen B).
  Proof. apply sort_permutation. Qed.

  Lemma units_bounds : Forall (fun u => s <= first u /\ first u + width u <= s + tokens_in units /\ 1 <= width u) units
                       /\ StronglySorted (fun u v => first u + width u <= first v) units.
  Proof.
    revert s laid. unfold tokens_in. clear. induction units as [|u rest IH]; intros s L; [split; constructor|].
    cbn in L. destruct L as (<- & Hu & L). destruct (IH _ L) as [F S]. cbn [map sum].
    assert (0 <= sum (map width rest)).
    { apply sum_nonneg, Forall_map. eapply Forall_impl; [|exact F]. cbn beta. lia. }
    split; constructor; try lia; try assumption; (eapply Forall_impl; [|exact F]); cbn beta; lia.
  Qed.

  Lemma widths : Forall (fun u => 1 <= width u) units.
  Proof. destruct units_bounds as [F _]. eapply Forall_impl; [|exact F]. cbn beta. lia. Qed.

  Lemma others_in u : In u others <-> In u units /\ pinned u = false.
  Proof. unfold others. rewrite (in_sort preferred), filter_In, negb_true_iff. reflexivity. Qed.

  Lemma others_wide : Forall (fun u => 1 <= width u) others.
  Proof.
    destruct units_bounds as [F _]. rewrite Forall_forall in *. intros u Hu. apply others_in in Hu as [Hu _].
    now apply F.
  Qed.

  Lemma safe_nonneg : 0 <= tokens_in safe.
  Proof.
    destruct units_bounds as [F _]. apply sum_nonneg, Forall_map, Forall_forall. intros u Hu.
    apply filter_In in Hu as [Hu _]. rewrite Forall_forall in F. specialize (F u Hu). lia.
  Qed.

  Lemma chosen_incl B : incl (chosen B) units.
  Proof.
    intros u Hu. apply in_app_or in Hu as [Hu|Hu]; [now apply filter_In in Hu|].
    destruct (fit_prefix others (B - tokens_in safe)) as [rest E].
    apply others_in. rewrite E. apply in_or_app. now left.
  Qed.

  Lemma firsts_distinct : NoDup (map first units).
  Proof.
    destruct units_bounds as [_ S]. pose proof widths as F. clear - F S.
    induction S as [|u l S IH G]; cbn; constructor; inversion F; subst; [|now apply IH].
    intros I. apply in_map_iff in I as (v & E & Hv). rewrite Forall_forall in G. specialize (G v Hv). lia.
  Qed.

  Lemma chosen_distinct B : NoDup (map first (chosen B)).
  Proof.
    apply NoDup_left with (r := map first (let '(r) := others in drop (count (while_they_fit (B - tokens_in safe) others)) r)).
    rewrite <- map_app. unfold chosen.
    destruct (fit_prefix others (B - tokens_in safe)) as [rest E].
    replace (drop _ others) with rest.
    - rewrite <- app_assoc, <- E. eapply Permutation_NoDup; [|exact firsts_distinct]. apply Permutation_map.
      rewrite Permutation_app_comm. unfold others. rewrite (sort_permutation preferred). symmetry.
      apply partition_permutation.
    - rewrite E at 2. generalize (while_they_fit (B - tokens_in safe) others) as l. clear. induction l as [|u l IH]; cbn [count app].
      + destruct rest; reflexivity.
      + cbn [drop]. pose proof (count_nonneg l). destruct (Z.leb_spec (1 + count l) 0); [lia|].
        now replace (1 + count l - 1) with (count l) by lia.
  Qed.

  Lemma selected_count B : count (selected B units) = tokens_in (top_units B units).
  Proof.
    unfold selected, tokens_in. apply count_flat_map. apply Forall_forall. intros u Hu.
    apply (Permutation_in _ (top_units_permutation B)), chosen_incl in Hu.
    destruct units_bounds as [F _]. rewrite Forall_forall in F. specialize (F u Hu). rewrite count_range. lia.
  Qed.

  (* Pinned units stay, whatever B. *)
  Theorem PO_TOP_UNITS_pinned B u x :
    In u units -> pinned u = true -> first u <= x < first u + width u -> In x (selected B units).
  Proof.
    intros Hu Pu Hx. apply in_flat_map. exists u. split; [|now apply in_range].
    apply (Permutation_in _ (Permutation_sym (top_units_permutation B))), in_or_app. left. now apply filter_In.
  Qed.

  (* The share is met, or what is kept is pinned. *)
  Theorem PO_TOP_UNITS_share B : count (selected B units) <= Z.max B (tokens_in safe).
  Proof.
    rewrite selected_count. unfold tokens_in at 1.
    rewrite (sum_permutation _ _ (Permutation_map width (top_units_permutation B))).
    unfold chosen. rewrite map_app, sum_app. fold (tokens_in safe).
    destruct (Z_le_gt_dec (B - tokens_in safe) 0) as [L|L].
    - rewrite fit_nothing by (apply others_wide || assumption). cbn. lia.
    - pose proof (fit_room others (B - tokens_in safe) ltac:(lia)) as Fit.
      change (tokens_in safe + tokens_in (while_they_fit (B - tokens_in safe) others) <= Z.max B (tokens_in safe)). lia.
  Qed.

  (* Positions ascend without repetition. *)
  Theorem PO_TOP_UNITS_ascends B : StronglySorted Z.lt (selected B units).
  Proof.
    assert (StronglySorted (fun u v => first u < first v) (top_units B units)) as S.
    { apply ascending_strictly; [apply sort_places|].
      eapply Permutation_NoDup; [apply Permutation_map, Permutation_sym, top_units_permutation|apply chosen_distinct]. }
    assert (incl (top_units B units) units) as I.
    { intros u Hu. now apply (Permutation_in _ (top_units_permutation B)), chosen_incl in Hu. }
    destruct units_bounds as [_ G]. pose proof widths as F.
    assert (forall u v, In u units -> In v units -> first u < first v -> first u + width u <= first v) as Apart.
    { clear - F G. induction G as [|w l G IH W]; [easy|]. inversion F as [|? ? Hw F']; subst.
      rewrite Forall_forall in W. intros u v [<-|Hu] [<-|Hv] L; [lia|now apply W| |now apply IH].
      specialize (W u Hu). lia. }
    unfold selected. induction S as [|u l S IH W]; cbn [flat_map]; [constructor|].
    apply StronglySorted_app; [apply range_ascends|apply IH; intros v Hv; apply I; now right|].
    intros x y Hx Hy. apply in_range in Hx. apply in_flat_map in Hy as (v & Hv & Hy). apply in_range in Hy.
    rewrite Forall_forall in W. specialize (Apart u v (I u (or_introl eq_refl)) (I v (or_intror Hv)) (W v Hv)). lia.
  Qed.

  (* A larger share keeps what a smaller one keeps. *)
  Theorem PO_TOP_UNITS_nested B B' : B <= B' -> incl (selected B units) (selected B' units).
  Proof.
    intros HB x Hx. apply in_flat_map in Hx as (u & Hu & Hx). apply in_flat_map. exists u. split; [|assumption].
    apply (Permutation_in _ (top_units_permutation B)) in Hu.
    apply (Permutation_in _ (Permutation_sym (top_units_permutation B'))). unfold chosen in *.
    apply in_app_or in Hu as [Hu|Hu]; apply in_or_app; [now left|right].
    eapply fit_monotone; [|exact Hu]. lia.
  Qed.

  (* Units of one token: the share is met exactly, or exceeded by what is pinned alone. *)
  Theorem PO_TOP_UNITS_tokens B : Forall (fun u => width u = 1) units ->
    count (selected B units) = Z.max (tokens_in safe) (Z.min B (tokens_in units)).
  Proof.
    intros One. rewrite selected_count.
    assert (forall l, incl l units -> tokens_in l = count l) as Ones.
    { intros l I. rewrite Forall_forall in One. assert (Forall (fun u => width u = 1) l) as F by (apply Forall_forall; auto).
      unfold tokens_in. clear - F. induction F; cbn [map sum count]; lia. }
    assert (incl others units) as Io by (intros u Hu; now apply others_in in Hu).
    rewrite (Ones units), (Ones (top_units B units));
      [|intros u Hu; eapply chosen_incl, Permutation_in; [apply top_units_permutation|exact Hu]|easy].
    rewrite (count_permutation _ _ (top_units_permutation B)). unfold chosen.
    rewrite fit_tokens by (apply Forall_forall; intros u Hu; rewrite Forall_forall in One; auto).
    rewrite count_app, count_take.
    assert (tokens_in safe = count safe) as -> by (apply Ones; intros u Hu; now apply filter_In in Hu).
    assert (count units = count safe + count others) as ->.
    { unfold others. rewrite (count_permutation _ _ (sort_permutation _ _)).
      rewrite <- (count_permutation _ _ (partition_permutation pinned units)), count_app. fold safe. lia. }
    pose proof (count_nonneg others). lia.
  Qed.

  Lemma higher_asym `{!Ordered R} x y : higher x y = true -> higher y x = false.
  Proof. destruct x, y; cbn; try easy. apply ltb_asym. Qed.

  Lemma higher_cotrans `{!Ordered R} x y z : higher x z = true -> higher x y = true \/ higher y z = true.
  Proof. destruct x, y, z; cbn; intros L; auto; try easy. rewrite or_comm. now apply ltb_cotrans. Qed.

  (* Who stays though nothing pins him is preferred to whoever goes: the higher score, or the lower unit. *)
  Theorem PO_TOP_UNITS_preferred `{!Ordered R} B u v :
    In u (top_units B units) -> pinned u = false -> In v units -> ~ In v (top_units B units) ->
    higher (value u) (value v) = true \/ (higher (value v) (value u) = false /\ first u <= first v).
  Proof.
    intros Hu Pu Hv Nv. pose proof (top_units_permutation B) as P.
    apply (Permutation_in _ P) in Hu. unfold chosen in Hu. apply in_app_or in Hu as [Hu|Hu].
    { apply filter_In in Hu as [_ E]. congruence. }
    assert (In v others) as Ov.
    { apply others_in. split; [assumption|]. destruct (pinned v) eqn:E; [|reflexivity]. exfalso. apply Nv.
      apply (Permutation_in _ (Permutation_sym P)), in_or_app. left. now apply filter_In. }
    destruct (fit_prefix others (B - tokens_in safe)) as [rest E].
    rewrite E in Ov. apply in_app_or in Ov as [Ov|Ov].
    { exfalso. apply Nv, (Permutation_in _ (Permutation_sym P)), in_or_app. now right. }
    assert (StronglySorted (fun a b => preferred a b = true) others) as S.
    { apply sort_ties; [intros; now apply higher_asym|intros; now apply higher_cotrans]. }
    rewrite E in S. apply ties_true with (ahead := fun a b => higher (value a) (value b)).
    clear - S Hu Ov. revert S Hu. generalize (while_they_fit (B - tokens_in safe) others) as l.
    induction l as [|w l IH]; cbn; intros S Hu; [easy|]. inversion S as [|? ? S' F]; subst.
    destruct Hu as [<-|Hu]; [|now apply IH]. rewrite Forall_forall in F. apply F, in_or_app. now right.
  Qed.

  (* The tokens of the units that are neither pinned nor later than u: the higher score first, one without a score last, of
     equal ones the lower unit. *)
  Definition preferred_to (u : unit_of R) : Z :=
    tokens_in (filter (fun v : unit_of R => higher (value v) (value u) || (negb (higher (value u) (value v)) && (first v <? first u)))
                      (filter (fun v => negb (pinned v)) units)).

  Lemma fit_prefix_sum l u r : forall room, Forall (fun v : unit_of R => 1 <= width v) (l ++ u :: r) -> NoDup (l ++ u :: r) ->
    In u (while_they_fit room (l ++ u :: r)) <-> tokens_in l + width u <= room.
  Proof.
    unfold tokens_in. induction l as [|v l IH]; intros room F N; cbn [app map sum while_they_fit]; inversion F as [|? ? Hv F']; subst.
    - destruct (Z.leb_spec (width u) room); [split; [lia|now left]|split; [easy|lia]].
    - cbn in N. inversion N as [|? ? Out N']; subst.
      assert (0 <= sum (map width l)) as P.
      { apply sum_nonneg, Forall_map. apply Forall_app in F' as [F' _]. eapply Forall_impl; [|exact F']. cbn beta. lia. }
      assert (1 <= width u) as Hu by (apply Forall_app in F' as [_ F']; now inversion F').
      destruct (Z.leb_spec (width v) room); [|split; [easy|lia]]. cbn [In]. rewrite (IH (room - width v) F' N'). split.
      + intros [->|L]; [|lia]. exfalso. apply Out, in_or_app. right. now left.
      + right. lia.
  Qed.

  (* Which units stay, in one formula: the pinned ones, and those that fit behind all that are preferred to them. *)
  Theorem PO_TOP_UNITS_formula `{!Ordered R} B u : In u (top_units B units) <->
    In u units /\ (pinned u = true \/ preferred_to u + width u <= B - tokens_in safe).
  Proof.
    assert (In u (top_units B units) <-> In u (chosen B)) as ->.
    { split; apply Permutation_in; [|apply Permutation_sym]; apply top_units_permutation. }
    unfold chosen. rewrite in_app_iff. unfold safe at 1. rewrite filter_In.
    assert (pinned u = false -> In u units -> In u (while_they_fit (B - tokens_in safe) others) <-> preferred_to u + width u <= B - tokens_in safe) as E.
    { intros Pu Hu. assert (In u (filter (fun v => negb (pinned v)) units)) as Ho by (apply filter_In; now rewrite Pu).
      assert (NoDup (map first (filter (fun v => negb (pinned v)) units))) as N.
      { pose proof firsts_distinct as D. clear - D. induction units as [|v l IH]; cbn; [constructor|].
        inversion D as [|? ? Out D']; subst. destruct (pinned v); cbn; [now apply IH|]. constructor; [|now apply IH].
        intros I. apply Out. apply in_map_iff in I as (w & <- & Hw). apply filter_In in Hw as [Hw _]. now apply in_map. }
      destruct (sorted_split (fun v w : unit_of R => higher (value v) (value w)) first) with (all := filter (fun v => negb (pinned v)) units) (x := u)
        as (l & r & X & P); [intros; now apply higher_asym|intros; now apply higher_cotrans|assumption..|].
      pose proof others_wide as W. assert (others = l ++ u :: r) as Eo by exact X. rewrite Eo in W |- *.
      rewrite fit_prefix_sum; [|assumption|].
      - unfold preferred_to, tokens_in at 1. rewrite (sum_permutation _ _ (Permutation_map width P)). reflexivity.
      - rewrite <- Eo. eapply Permutation_NoDup; [apply Permutation_sym, sort_permutation|]. now apply NoDup_map_inv in N. }
    split.
    - intros [H0|H0]; [tauto|]. assert (In u others) as Ou.
      { destruct (fit_prefix others (B - tokens_in safe)) as [rest X]. rewrite X. apply in_or_app. now left. }
      apply others_in in Ou as [Hu Pu]. split; [assumption|]. right. now apply E.
    - intros [Hu [P|L]]; [now left|]. destruct (pinned u) eqn:Pu; [now left|right]. now apply E.
  Qed.
End Selection.
