(* Theorems about Budgets.v. *)
From Coq Require Import Lqa.
From Kvspec Require Export ListFacts Budgets.

(* ---- budgets as they are written ---- *)

(* The least number of tokens that is not below the fraction. *)
Theorem CC_BUDGET_FORMS_ceiling beta seen :
  (beta * inject_Z seen <= inject_Z (tokens (Fraction beta) seen) < beta * inject_Z seen + 1)%Q.
Proof.
  cbn. split; [apply Qle_ceiling|]. pose proof (Qceiling_lt (beta * inject_Z seen)) as L.
  replace (Qceiling (beta * inject_Z seen) - 1) with (Qceiling (beta * inject_Z seen) + -1) in L by lia.
  rewrite inject_Z_plus in L. change (inject_Z (-1)) with (-(1))%Q in L. lra.
Qed.

Theorem CC_BUDGET_FORMS_within beta seen :
  admitted (Fraction beta) <> None -> 0 < seen -> 1 <= tokens (Fraction beta) seen <= seen.
Proof.
  cbn [admitted]. destruct (Qle_bool beta 0) eqn:E; [easy|]. destruct (Qle_bool beta 1) eqn:F; [|easy].
  rewrite <- not_true_iff_false, Qle_bool_iff in E. apply Qnot_le_lt in E.
  apply Qle_bool_iff in F. intros _ Hs.
  pose proof (CC_BUDGET_FORMS_ceiling beta seen) as [L U]. revert L U. generalize (tokens (Fraction beta) seen) as t. intros t L U.
  assert (0 < inject_Z seen)%Q by (rewrite (Zlt_Qlt 0) in Hs; exact Hs).
  pose proof (Qmult_lt_0_compat _ _ E H). assert (beta * inject_Z seen <= 1 * inject_Z seen)%Q by (apply Qmult_le_compat_r; lra).
  assert (0 < inject_Z t)%Q as Ht by lra. assert (inject_Z t < inject_Z seen + 1)%Q as Hu by lra.
  change 0%Q with (inject_Z 0) in Ht. rewrite <- Zlt_Qlt in Ht.
  change 1%Q with (inject_Z 1) in Hu. rewrite <- inject_Z_plus, <- Zlt_Qlt in Hu. lia.
Qed.

(* Budget 1, as a fraction: everything. *)
Theorem CC_BUDGET_FORMS_whole seen : tokens (Fraction 1) seen = seen.
Proof. unfold tokens. rewrite Qmult_1_l. apply Qceiling_Z. Qed.

Theorem CC_BUDGET_FORMS_grows beta seen seen' :
  (0 <= beta)%Q -> seen <= seen' -> tokens (Fraction beta) seen <= tokens (Fraction beta) seen'.
Proof.
  intros Hb Hs. cbn. apply Qceiling_resp_le. rewrite Zle_Qle in Hs. rewrite !(Qmult_comm beta). now apply Qmult_le_compat_r.
Qed.

Local Open Scope string_scope.

(* `1` is one token, `1.0` is everything; 0.28 of 25 is 7. *)
Theorem CC_BUDGET_FORMS_examples :
  parse "1" = Some (Count 1) /\ parse " 1.0 " = Some (Fraction (10 # 10)) /\ parse "28%" = Some (Fraction (28 # 100))
  /\ option_map (fun b => tokens b 25) (parse "0.28") = Some 7
  /\ map parse [""; "half"; "1.5"; "200%"; "nan"; "1e-1"; "+1"; "1_0"; "50%%"; "9223372036854775808"; "."; "%"]
     = repeat None 12.
Proof. vm_compute. repeat split. Qed.

Local Close Scope string_scope.

Theorem CC_BUDGET_floor b n N_sink W_recent : N_sink + W_recent <= effective b n N_sink W_recent.
Proof. unfold effective. lia. Qed.

Theorem CC_BUDGET_above_the_floor b n N_sink W_recent :
  N_sink + W_recent <= tokens b n -> effective b n N_sink W_recent = tokens b n.
Proof. unfold effective. lia. Qed.

(* ---- largest remainder ---- *)

Lemma floor_remainder t : (0 <= remainder t < 1)%Q.
Proof.
  unfold remainder. pose proof (Qfloor_le t). pose proof (Qlt_floor t) as L. rewrite inject_Z_plus in L.
  change (inject_Z 1) with 1%Q in L. split; lra.
Qed.

Lemma served_permutation_sum order : forall missing, 0 <= missing <= count order ->
  sum (map snd (served missing order)) = sum (map (fun it => Qfloor (snd it)) order) + missing.
Proof.
  induction order as [|[i t] order IH]; intros missing Hm; cbn [count] in Hm; cbn; [lia|].
  destruct (Z.ltb_spec 0 missing).
  - rewrite IH; lia.
  - assert (missing = 0) as -> by lia. clear IH Hm H. enough (forall m, m <= 0 ->
      sum (map snd (served m order)) = sum (map (fun it => Qfloor (snd it)) order)) as E by (rewrite E; lia).
    induction order as [|[j u] order IH]; intros m Hm; cbn; [reflexivity|].
    destruct (Z.ltb_spec 0 m); [lia|]. rewrite IH; lia.
Qed.

Lemma served_each order : forall missing i k,
  In (i, k) (served missing order) -> exists t, In (i, t) order /\ (k = Qfloor t \/ k = Qfloor t + 1).
Proof.
  induction order as [|[j u] order IH]; intros missing i k Hi; cbn in *; [easy|]. destruct Hi as [E|Hi].
  - injection E as <- <-. exists u. split; [now left|]. destruct (0 <? missing); [right|left]; lia.
  - destruct (IH _ _ _ Hi) as (t & Ht & K). exists t. auto.
Qed.

Lemma served_fst order : forall missing, map fst (served missing order) = map fst order.
Proof. induction order as [|[i t] order IH]; intros missing; cbn; [|rewrite IH]; reflexivity. Qed.

Lemma served_none order : forall missing, missing <= 0 -> forall i k,
  In (i, k) (served missing order) -> exists t, In (i, t) order /\ k = Qfloor t.
Proof.
  induction order as [|[j u] order IH]; intros missing Hm i k Hi; cbn in Hi; [easy|]. destruct (Z.ltb_spec 0 missing); [lia|].
  destruct Hi as [E|Hi].
  - injection E as <- <-. exists u. split; [now left|lia].
  - destruct (IH (missing - 1) ltac:(lia) i k Hi) as (t & Ht & K). exists t. split; [now right|assumption].
Qed.

(* Who gets one more has no smaller remainder than who gets none. *)
Lemma served_first order : StronglySorted (fun x y => first_served x y = true) order -> NoDup (map fst order) ->
  forall missing i t j u, In (i, t) order -> In (j, u) order ->
  In (i, Qfloor t + 1) (served missing order) -> In (j, Qfloor u) (served missing order) -> (remainder u <= remainder t)%Q.
Proof.
  induction 1 as [|[a x] order S IH F]; intros N missing i t j u Hi Hj Gi Gj; [easy|]. cbn [map fst] in N.
  inversion N as [|? ? Out N']; subst.
  assert (forall k y, In (k, y) order -> k <> a) as Not by (intros k y Hk ->; apply Out; now apply (in_map fst) in Hk).
  assert (forall k y m, In (k, y) (served m order) -> k <> a) as Not'.
  { intros k y m Hk ->. apply Out. rewrite <- (served_fst order m). now apply (in_map fst) in Hk. }
  cbn in Hi, Hj, Gi, Gj. destruct Hi as [Ei|Hi], Hj as [Ej|Hj].
  - injection Ei as <- <-. injection Ej as <- <-. apply Qle_refl.
  - injection Ei as <- <-. rewrite Forall_forall in F. specialize (F _ Hj). unfold first_served in F.
    apply ties_never_back in F; [|intros; now apply ltb_asym]. cbv beta in F. cbn [snd] in F.
    rewrite <- not_true_iff_false, rational_less in F. now apply Qnot_lt_le.
  - injection Ej as <- <-. exfalso. destruct Gj as [Ej|Gj]; [|now apply Not' in Gj]. injection Ej as Ej.
    destruct (Z.ltb_spec 0 missing); [lia|]. destruct Gi as [Ei|Gi]; [injection Ei as -> _; now apply Not in Hi|].
    apply served_none in Gi as (t' & Ht & K); [|lia]. assert (t' = t) as ->; [|lia].
    clear - N' Hi Ht. induction order as [|[b y] order IH]; [easy|]. inversion N' as [|? ? Out N'']; subst.
    destruct Hi as [Ei|Hi], Ht as [Et|Ht]; try congruence.
    + injection Ei as -> ->. exfalso. apply Out. now apply (in_map fst) in Ht.
    + injection Et as -> ->. exfalso. apply Out. now apply (in_map fst) in Hi.
    + now apply IH.
  - destruct Gi as [Ei|Gi]; [injection Ei as -> _; now apply Not in Hi|].
    destruct Gj as [Ej|Gj]; [injection Ej as -> _; now apply Not in Hj|]. now apply (IH N' (missing - 1) i t j u).
Qed.

Section Shares.
  Variable targets : list Q.
  Let floors := sum (map Qfloor targets).
  Let missing := Qfloor (sum_Q targets) - floors.
  Let order := sort first_served (numbered 0 targets).

  Lemma remainders : (sum_Q targets == inject_Z floors + sum_Q (map remainder targets))%Q.
  Proof.
    unfold floors. clear. induction targets as [|t l IH]; [reflexivity|]. cbn [map sum].
    change (t + sum_Q l == inject_Z (Qfloor t + sum (map Qfloor l)) + (remainder t + sum_Q (map remainder l)))%Q.
    rewrite IH, inject_Z_plus. unfold remainder. ring.
  Qed.

  Lemma remainders_bound : (0 <= sum_Q (map remainder targets) <= inject_Z (count targets))%Q.
  Proof.
    clear. induction targets as [|t l IH]; cbn [map sum_Q fold_right count]; [split; apply Qle_refl|].
    pose proof (floor_remainder t). rewrite inject_Z_plus. change (inject_Z 1) with 1%Q.
    fold (sum_Q (map remainder l)). generalize dependent (sum_Q (map remainder l)). intros. lra.
  Qed.

  Lemma missing_bound : 0 <= missing <= count targets.
  Proof.
    pose proof remainders as E. pose proof remainders_bound as [L U].
    assert (inject_Z floors <= sum_Q targets)%Q as A by lra.
    assert (sum_Q targets <= inject_Z (floors + count targets))%Q as B by (rewrite inject_Z_plus; lra).
    apply Qfloor_resp_le in A, B. rewrite Qfloor_Z in A, B. unfold missing. lia.
  Qed.

  Lemma order_permutation : Permutation order (numbered 0 targets).
  Proof. apply sort_permutation. Qed.

  Lemma order_count : count order = count targets.
  Proof. rewrite (count_permutation _ _ order_permutation), <- (count_map snd), numbered_snd. reflexivity. Qed.

  Lemma shares_permutation : Permutation (whole_shares targets) (map snd (served missing order)).
  Proof. unfold whole_shares. apply Permutation_map, sort_permutation. Qed.

  (* The sum of the targets, where it is whole; its floor otherwise. *)
  Theorem PO_WHOLE_SHARES_sum : sum (whole_shares targets) = Qfloor (sum_Q targets).
  Proof.
    rewrite (sum_permutation _ _ shares_permutation), served_permutation_sum by (rewrite order_count; apply missing_bound).
    rewrite (sum_permutation _ _ (Permutation_map (fun it : Z * Q => Qfloor (snd it)) order_permutation)).
    replace (map (fun it : Z * Q => Qfloor (snd it)) (numbered 0 targets)) with (map Qfloor targets).
    - unfold missing, floors. lia.
    - rewrite <- (numbered_snd 0 targets) at 1. now rewrite map_map.
  Qed.

  Theorem PO_WHOLE_SHARES_number : count (whole_shares targets) = count targets.
  Proof.
    rewrite (count_permutation _ _ shares_permutation), count_map, <- (count_map fst), served_fst, count_map.
    apply order_count.
  Qed.

  Theorem PO_WHOLE_SHARES_larger_remainder i t j u :
    In (i, t) (numbered 0 targets) -> In (j, u) (numbered 0 targets) ->
    In (i, Qfloor t + 1) (served missing order) -> In (j, Qfloor u) (served missing order) -> (remainder u <= remainder t)%Q.
  Proof.
    intros Hi Hj. apply served_first.
    - apply sort_ties; [intros; now apply ltb_asym|intros; rewrite or_comm; now apply ltb_cotrans].
    - eapply Permutation_NoDup; [apply Permutation_map, Permutation_sym, order_permutation|]. rewrite numbered_fst.
      apply ascending_NoDup, range_ascends.
    - now apply (Permutation_in _ (Permutation_sym order_permutation)).
    - now apply (Permutation_in _ (Permutation_sym order_permutation)).
  Qed.

  (* Quota: each share is its target rounded down or up. *)
  Theorem PO_WHOLE_SHARES_quota : Forall2 (fun t k => k = Qfloor t \/ k = Qfloor t + 1) targets (whole_shares targets).
  Proof.
    set (by_index := sort (fun x y : Z * Z => fst x <=? fst y) (served missing order)).
    assert (map fst by_index = map fst (numbered 0 targets)) as E.
    { apply (ascending_unique (fun x => x)).
      - eapply StronglySorted_map with (R := fun x y : Z * Z => fst x < fst y); [easy|].
        apply ascending_strictly; [apply sort_places|].
        eapply Permutation_NoDup; [apply Permutation_map, Permutation_sym, sort_permutation|]. rewrite served_fst.
        eapply Permutation_NoDup; [apply Permutation_map, Permutation_sym, order_permutation|]. rewrite numbered_fst.
        apply ascending_NoDup, range_ascends.
      - rewrite numbered_fst. apply range_ascends.
      - unfold by_index. rewrite (Permutation_map fst (sort_permutation _ _)), served_fst.
        apply Permutation_map, order_permutation. }
    assert (forall i k, In (i, k) by_index -> exists t, In (i, t) (numbered 0 targets) /\ (k = Qfloor t \/ k = Qfloor t + 1)) as Each.
    { intros i k Hi. apply in_sort in Hi. apply served_each in Hi as (t & Ht & K). exists t. split; [|assumption].
      now apply (Permutation_in _ order_permutation). }
    change (whole_shares targets) with (map snd by_index). clearbody by_index. revert E Each. generalize 0 as s.
    generalize targets as ts. clear. induction by_index as [|[i k] l IH]; intros ts s E Each.
    - destruct ts; [constructor|discriminate].
    - destruct ts as [|t ts]; [discriminate|]. cbn in E. injection E as -> E. cbn [map snd]. constructor.
      + destruct (Each s k (or_introl eq_refl)) as (u & [Hu|Hu] & K); [now injection Hu as <-|].
        apply (in_map fst) in Hu. rewrite numbered_fst in Hu. apply in_range in Hu. cbn in Hu. lia.
      + apply (IH ts (s + 1) E). intros j m Hj. destruct (Each j m (or_intror Hj)) as (u & [Hu|Hu] & K); [|now exists u].
        injection Hu as <- <-. apply (in_map fst) in Hj. rewrite E, numbered_fst in Hj. apply in_range in Hj. cbn in Hj. lia.
  Qed.
End Shares.

(* ---- PyramidKV's line ---- *)

Lemma sum_Q_app l r : (sum_Q (l ++ r) == sum_Q l + sum_Q r)%Q.
Proof.
  induction l as [|x l IH]; [change (sum_Q r == 0 + sum_Q r)%Q; ring|].
  change (x + sum_Q (l ++ r) == x + sum_Q l + sum_Q r)%Q. rewrite IH. ring.
Qed.

Lemma line_sum (a d : Q) m :
  (sum_Q (map (fun l => a - inject_Z l * d) (range 0 (Z.of_nat m))) * 2
   == inject_Z (Z.of_nat m) * (2 * a - d * (inject_Z (Z.of_nat m) - 1)))%Q.
Proof.
  unfold range. rewrite Z.sub_0_r, Nat2Z.id. induction m as [|m IH]; [reflexivity|].
  rewrite seq_S, !map_app, sum_Q_app, Qmult_plus_distr_l, IH. cbn [map seq sum_Q fold_right].
  rewrite Nat2Z.inj_succ. unfold Z.succ. rewrite !inject_Z_plus. change (inject_Z 1) with 1%Q.
  change (inject_Z 0) with 0%Q. rewrite Nat.add_0_l. ring.
Qed.

(* The mean over the layers is the base. *)
Theorem PO_PYRAMID_BUDGET_mean base past beta L :
  1 <= L -> (base <= past)%Q -> (sum_Q (pyramid base past beta L) == inject_Z L * base)%Q.
Proof.
  intros HL HB. unfold pyramid.
  destruct ((L =? 1) || Qle_bool past base) eqn:Flat.
  - assert (forall c : Q, (c == base)%Q -> (sum_Q (map (fun _ => c) (range 0 L)) == inject_Z L * base)%Q) as Same.
    { intros c Hc. pose proof (line_sum c 0 (Z.to_nat L)) as S. rewrite Z2Nat.id in S by lia.
      assert (sum_Q (map (fun l => c - inject_Z l * 0) (range 0 L)) == sum_Q (map (fun _ => c) (range 0 L)))%Q as E.
      { generalize (range 0 L) as r. induction r as [|l r IH]; [reflexivity|]. cbn [map].
        change (c - inject_Z l * 0 + sum_Q (map (fun l => c - inject_Z l * 0) r) == c + sum_Q (map (fun _ => c) r))%Q.
        rewrite IH. ring. }
      rewrite E in S. rewrite Hc in S. lra. }
    apply Same. destruct (Qle_bool past base) eqn:P; [|reflexivity]. apply Qle_bool_iff in P. lra.
  - apply orb_false_iff in Flat as [One _]. apply Z.eqb_neq in One.
    set (least := if Qle_bool past (2 * base - base / beta) then (2 * base - past)%Q else (base / beta)%Q).
    pose proof (line_sum (2 * base - least) ((2 * base - least - least) / inject_Z (L - 1)) (Z.to_nat L)) as S.
    rewrite Z2Nat.id in S by lia. assert (~ inject_Z (L - 1) == 0)%Q as NZ by (unfold Qeq; cbn; lia).
    assert (inject_Z L - 1 == inject_Z (L - 1))%Q as E.
    { unfold Z.sub. rewrite inject_Z_plus. reflexivity. }
    rewrite E in S. rewrite (Qmult_comm ((2 * base - least - least) / inject_Z (L - 1))), Qmult_div_r in S by assumption.
    assert (inject_Z L * (2 * (2 * base - least) - (2 * base - least - least)) == inject_Z L * base * 2)%Q as T by ring.
    rewrite T in S. lra.
Qed.
