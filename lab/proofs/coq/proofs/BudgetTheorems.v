(* Theorems about Budgets.v. *)
From Coq Require Import Lqa.
From Kvspec Require Export Ranks Budgets.

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

(* The least number of tokens that holds the sink, the recent window and what is asked for. *)
Theorem CC_BUDGET_is_the_least b n N_sink W_recent m : effective b n N_sink W_recent <= m <->
  N_sink + W_recent <= m /\ match b with Fraction beta => (beta * inject_Z n <= inject_Z m)%Q | Count c => c <= m end.
Proof.
  unfold effective. destruct b as [beta|c]; cbn [tokens]; [|lia].
  enough (Qceiling (beta * inject_Z n) <= m <-> (beta * inject_Z n <= inject_Z m)%Q) as <- by lia. split; intros L.
  - eapply Qle_trans; [apply Qle_ceiling|]. now rewrite <- Zle_Qle.
  - apply Qceiling_resp_le in L. now rewrite Qceiling_Z in L.
Qed.

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

  Lemma numbers_distinct : NoDup (map fst (numbered 0 targets)).
  Proof. rewrite numbered_fst. apply ascending_NoDup, range_ascends. Qed.

  (* How many targets are served before the i-th, t: the larger remainder, of equal ones the lower index. *)
  Definition before_it (i : Z) (t : Q) : Z :=
    count (filter (fun '(j, u) => negb (Qle_bool (remainder u) (remainder t))
                                  || (Qle_bool (remainder t) (remainder u) && (j <? i))) (numbered 0 targets)).

  Lemma served_rank l i t r : forall m, NoDup (map fst (l ++ (i, t) :: r)) -> forall k,
    In (i, k) (served m (l ++ (i, t) :: r)) <-> k = Qfloor t + if count l <? m then 1 else 0.
  Proof.
    induction l as [|[j u] l IH]; intros m N k; cbn [app served In count].
    - split; [|intros ->; now left]. intros [E|I]; [now injection E|]. cbn in N. inversion N as [|? ? Out _]; subst.
      exfalso. apply Out. rewrite <- (served_fst r (m - 1)). now apply (in_map fst) in I.
    - cbn in N. inversion N as [|? ? Out N']; subst. rewrite (IH (m - 1) N').
      replace (1 + count l <? m) with (count l <? m - 1) by (destruct (Z.ltb_spec (count l) (m - 1)), (Z.ltb_spec (1 + count l) m); lia).
      split; [|now right]. intros [E|I]; [|assumption]. injection E as -> _. exfalso. apply Out. rewrite map_app. apply in_or_app.
      right. now left.
  Qed.

  (* The shares, each by a formula of its own: the target rounded down, and one more for the first `missing` targets. *)
  Theorem PO_WHOLE_SHARES_formula : whole_shares targets
    = map (fun '(i, t) => Qfloor t + if before_it i t <? Qfloor (sum_Q targets) - sum (map Qfloor targets) then 1 else 0) (numbered 0 targets).
  Proof.
    set (by_index := sort (fun x y : Z * Z => fst x <=? fst y) (served missing order)).
    transitivity (map snd (map (fun '(i, t) => (i, Qfloor t + if before_it i t <? missing then 1 else 0)) (numbered 0 targets))).
    2: { rewrite map_map. apply map_ext. now intros []. }
    change (whole_shares targets) with (map snd by_index). f_equal.
    assert (NoDup (map fst (served missing order))) as N.
    { rewrite served_fst. eapply Permutation_NoDup; [apply Permutation_map, Permutation_sym, order_permutation|]. apply numbers_distinct. }
    assert (StronglySorted (fun x y : Z * Z => fst x < fst y) by_index) as S1.
    { apply ascending_strictly; [apply sort_places|]. eapply Permutation_NoDup; [|exact N].
      apply Permutation_map, Permutation_sym, sort_permutation. }
    set (formula := map _ (numbered 0 targets)).
    assert (map fst formula = range 0 (0 + count targets)) as F.
    { unfold formula. rewrite map_map, <- numbered_fst. apply map_ext. now intros []. }
    assert (StronglySorted (fun x y : Z * Z => fst x < fst y) formula) as S2.
    { pose proof (range_ascends 0 (0 + count targets)) as A. rewrite <- F in A. clear - A. induction formula as [|x l IH]; [constructor|].
      cbn in A. inversion A as [|? ? A' G]; subst. constructor; [now apply IH|]. now rewrite Forall_map in G. }
    apply (ascending_unique fst); [assumption..|].
    assert (forall l : list (Z * Z), NoDup (map fst l) -> NoDup l) as Plain by (intros l D; now apply NoDup_map_inv in D).
    apply NoDup_Permutation.
    - apply Plain. eapply Permutation_NoDup; [|exact N]. apply Permutation_map, Permutation_sym, sort_permutation.
    - apply Plain. rewrite F. apply ascending_NoDup, range_ascends.
    - intros [i k]. unfold by_index. rewrite in_sort. unfold formula. rewrite in_map_iff.
      assert (forall t, In (i, t) (numbered 0 targets) -> In (i, k) (served missing order) <-> k = Qfloor t + if before_it i t <? missing then 1 else 0) as E.
      { intros t Ht. destruct (sorted_split (fun x y : Z * Q => ltb (remainder (snd y)) (remainder (snd x))) fst) with (all := numbered 0 targets) (x := (i, t))
          as (l & r & E & P); [intros; now apply ltb_asym|intros; rewrite or_comm; now apply ltb_cotrans|apply numbers_distinct|assumption|].
        assert (order = l ++ (i, t) :: r) as Eo by exact E. rewrite Eo. rewrite served_rank.
        - replace (before_it i t) with (count l); [reflexivity|]. rewrite (count_permutation _ _ P). unfold before_it, earlier. f_equal.
          apply filter_ext. intros [j u]. cbn. now rewrite negb_involutive.
        - rewrite <- Eo. eapply Permutation_NoDup; [apply Permutation_map, Permutation_sym, order_permutation|]. apply numbers_distinct. }
      split.
      + intros I. pose proof I as J. apply (in_map fst) in J. rewrite served_fst in J.
        apply in_map_iff in J as ([j t] & Ej & Hj). cbn in Ej. subst j. apply (Permutation_in _ order_permutation) in Hj.
        exists (i, t). split; [|assumption]. f_equal. symmetry. now apply E.
      + intros ([j t] & Ej & Hj). injection Ej as -> Ek. symmetry in Ek. now apply (E t Hj).
  Qed.

  (* Quota: each share is its target rounded down or up; a whole target is its own share. *)
  Theorem PO_WHOLE_SHARES_quota : Forall2 (fun t k => Qfloor t <= k <= Qceiling t) targets (whole_shares targets).
  Proof.
    rewrite PO_WHOLE_SHARES_formula.
    enough (forall i t, In (i, t) (numbered 0 targets) -> before_it i t < missing -> Qceiling t = Qfloor t + 1) as Up.
    { assert (forall t, Qfloor t <= Qceiling t) as Le.
      { intros t. rewrite Zle_Qle. eapply Qle_trans; [apply Qfloor_le|apply Qle_ceiling]. }
      fold floors missing. rewrite <- (numbered_snd 0 targets) at 1. revert Up. generalize (numbered 0 targets) as l.
      induction l as [|[i t] l IH]; intros Up; cbn [map snd]; [constructor|]. constructor; [|apply IH; intros j u Hj; apply (Up j u); now right].
      specialize (Le t). destruct (Z.ltb_spec (before_it i t) missing) as [L|L]; [|lia]. rewrite (Up i t (or_introl eq_refl) L). lia. }
    intros i t Ht L.
    enough (0 < remainder t)%Q as P.
    { pose proof (floor_remainder t) as [_ U]. unfold remainder in *. apply Z.le_antisymm.
      - rewrite <- (Qceiling_Z (Qfloor t + 1)). apply Qceiling_resp_le. rewrite inject_Z_plus. change (inject_Z 1) with 1%Q. lra.
      - enough (Qfloor t < Qceiling t) by lia. rewrite Zlt_Qlt. pose proof (Qle_ceiling t). lra. }
    destruct (Qlt_le_dec 0 (remainder t)) as [|Z0]; [assumption|exfalso].
    (* Without a remainder, all that have one come before it, and those are enough. *)
    assert (inject_Z missing <= inject_Z (before_it i t))%Q as More; [|rewrite <- Zle_Qle in More; lia].
    assert (inject_Z missing <= sum_Q (map remainder targets))%Q as Few.
    { pose proof remainders as E. pose proof (Qfloor_le (sum_Q targets)) as F. unfold missing. unfold Z.sub.
      rewrite inject_Z_plus, inject_Z_opp. lra. }
    eapply Qle_trans; [exact Few|]. unfold before_it. rewrite <- (numbered_snd 0 targets) at 1.
    generalize (numbered 0 targets) as l. clear - Z0. induction l as [|[j u] l IH]; cbn [map filter snd].
    - apply Qle_refl.
    - change (sum_Q (remainder u :: map remainder (map snd l))) with (remainder u + sum_Q (map remainder (map snd l)))%Q.
      pose proof (floor_remainder u) as [R0 R1]. destruct (Qle_bool (remainder u) (remainder t)) eqn:E; cbn [negb orb].
      + apply Qle_bool_iff in E. destruct (_ && _); cbn [count]; rewrite ?inject_Z_plus; change (inject_Z 1) with 1%Q; lra.
      + cbn [count]. rewrite inject_Z_plus. change (inject_Z 1) with 1%Q. lra.
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

(* The budget holds everything: so does every layer. *)
Theorem PO_PYRAMID_BUDGET_everything base past beta L : (past <= base)%Q -> pyramid base past beta L = map (fun _ => past) (range 0 L).
Proof. intros H. apply Qle_bool_iff in H. unfold pyramid. rewrite H. now rewrite orb_true_r. Qed.

Theorem PO_PYRAMID_BUDGET_one_layer base past beta : (base < past)%Q -> pyramid base past beta 1 = [base].
Proof. intros H. apply Qlt_not_le in H. rewrite <- Qle_bool_iff in H. apply not_true_iff_false in H. unfold pyramid. now rewrite H. Qed.

(* Layer l has its point on the line from `top`, the paper's or all that is there, to what makes the mean `base`. *)
Theorem PO_PYRAMID_BUDGET_line base past beta L : 2 <= L -> (base < past)%Q ->
  exists top, (top <= past)%Q /\ (top <= 2 * base - base / beta)%Q /\ ((top == past)%Q \/ (top == 2 * base - base / beta)%Q)
    /\ Forall2 (fun l t => t == top - inject_Z l * ((top - (2 * base - top)) / inject_Z (L - 1)))%Q (range 0 L) (pyramid base past beta L).
Proof.
  intros HL HB. unfold pyramid. assert (Qle_bool past base = false) as ->.
  { apply not_true_iff_false. rewrite Qle_bool_iff. now apply Qlt_not_le. }
  replace (L =? 1) with false by (symmetry; apply Z.eqb_neq; lia). cbn [orb].
  set (least := if Qle_bool past (2 * base - base / beta) then (2 * base - past)%Q else (base / beta)%Q).
  exists (2 * base - least)%Q.
  assert (2 * base - least <= past /\ 2 * base - least <= 2 * base - base / beta
          /\ (2 * base - least == past \/ 2 * base - least == 2 * base - base / beta))%Q as (A & B & C).
  { unfold least. destruct (Qle_bool past (2 * base - base / beta)) eqn:E.
    - apply Qle_bool_iff in E. split; [lra|]. split; [lra|left; lra].
    - apply not_true_iff_false in E. rewrite Qle_bool_iff in E. apply Qnot_le_lt in E. split; [lra|]. split; [lra|right; reflexivity]. }
  repeat (split; [assumption|]). induction (range 0 L) as [|l r IH]; cbn [map]; constructor; [|assumption].
  assert (2 * base - (2 * base - least) == least)%Q as -> by ring. reflexivity.
Qed.

(* No layer has more than there is, or less than base / beta. *)
Theorem PO_PYRAMID_BUDGET_bounds base past beta L : (0 <= base <= past)%Q -> (1 <= beta)%Q -> 1 <= L ->
  Forall (fun t => base / beta <= t <= past)%Q (pyramid base past beta L).
Proof.
  intros [B0 BP] Hb HL. assert (base / beta <= base)%Q as Low by (apply Qle_shift_div_r; nra).
  destruct (Qlt_le_dec base past) as [Lt|Le].
  2: { rewrite PO_PYRAMID_BUDGET_everything by assumption. apply Forall_map, Forall_forall. intros; lra. }
  destruct (Z.eq_dec L 1) as [->|N].
  { rewrite PO_PYRAMID_BUDGET_one_layer by assumption. repeat constructor; lra. }
  destruct (PO_PYRAMID_BUDGET_line base past beta L ltac:(lia) Lt) as (top & A & B & C & F).
  assert (base <= top)%Q as Up by (destruct C; lra).
  assert (0 < inject_Z (L - 1))%Q as P by (change 0%Q with (inject_Z 0); rewrite <- Zlt_Qlt; lia).
  apply Forall_forall. intros t Ht.
  assert (exists l, In l (range 0 L) /\ t == top - inject_Z l * ((top - (2 * base - top)) / inject_Z (L - 1)))%Q as (l & Hl & ->).
  { clear - F Ht. induction F as [|l u r s E F IH]; [easy|]. destruct Ht as [->|Ht]; [exists l; split; [now left|assumption]|].
    destruct (IH Ht) as (m & Hm & E'). exists m. split; [now right|assumption]. }
  apply in_range in Hl. set (d := ((top - (2 * base - top)) / inject_Z (L - 1))%Q).
  assert (0 <= d)%Q as D by (apply Qle_shift_div_l; lra).
  assert (inject_Z (L - 1) * d == top - (2 * base - top))%Q as E by (unfold d; field; lra).
  assert (0 <= inject_Z l <= inject_Z (L - 1))%Q as [L0 L1] by (change 0%Q with (inject_Z 0); rewrite <- !Zle_Qle; lia).
  assert (0 <= inject_Z l * d)%Q by (now apply Qmult_le_0_compat).
  assert (inject_Z l * d <= inject_Z (L - 1) * d)%Q by (now apply Qmult_le_compat_r). lra.
Qed.

(* Made whole: one share a layer, none beyond what is there, and the mean is the budget or all there is. *)
Theorem PO_PYRAMID_BUDGET_shares base past beta L : 0 <= base -> 0 <= past -> (1 <= beta)%Q -> 1 <= L ->
  let shares := whole_shares (pyramid (inject_Z base) (inject_Z past) beta L) in
  count shares = L /\ Forall (fun k => 0 <= k <= past) shares /\ sum shares = L * Z.min base past.
Proof.
  intros B0 P0 Hb HL shares. set (line := pyramid (inject_Z base) (inject_Z past) beta L) in *.
  assert (count line = L) as N.
  { unfold line, pyramid. destruct (_ || _); rewrite count_map, count_range; lia. }
  assert (Forall (fun t => 0 <= t <= inject_Z past)%Q line /\ (sum_Q line == inject_Z (L * Z.min base past))%Q) as [F S].
  { assert (0 <= inject_Z base)%Q as Qb by (change 0%Q with (inject_Z 0); now rewrite <- Zle_Qle).
    assert (0 <= inject_Z past)%Q as Qp by (change 0%Q with (inject_Z 0); now rewrite <- Zle_Qle).
    destruct (Z_le_gt_dec past base) as [Le|Gt].
    - assert (inject_Z past <= inject_Z base)%Q as LeQ by now rewrite <- Zle_Qle.
      assert (line = pyramid (inject_Z past) (inject_Z past) beta L) as E.
      { unfold line. rewrite !PO_PYRAMID_BUDGET_everything by (assumption || apply Qle_refl). reflexivity. }
      rewrite Z.min_r by lia. split; [|rewrite E, inject_Z_mult; apply PO_PYRAMID_BUDGET_mean; [assumption|apply Qle_refl]].
      unfold line. rewrite PO_PYRAMID_BUDGET_everything by assumption. apply Forall_map, Forall_forall. intros _ _. split; [assumption|apply Qle_refl].
    - assert (inject_Z base <= inject_Z past)%Q as LeQ by (rewrite <- Zle_Qle; lia).
      rewrite Z.min_l by lia. split; [|rewrite inject_Z_mult; now apply PO_PYRAMID_BUDGET_mean].
      eapply Forall_impl; [|apply (PO_PYRAMID_BUDGET_bounds (inject_Z base) (inject_Z past) beta L); [split; assumption|assumption..]].
      intros t [T0 T1]. assert (0 <= inject_Z base / beta)%Q by (apply Qle_shift_div_l; lra). split; lra. }
  split; [|split].
  - unfold shares. now rewrite PO_WHOLE_SHARES_number.
  - pose proof (PO_WHOLE_SHARES_quota line) as W. revert W. fold shares. generalize shares as ks. clear - F.
    induction F as [|t ts [T0 T1] F IH]; intros ks W; inversion W as [|? k ? ks' K W']; subst; constructor; [|now apply IH].
    apply Qfloor_resp_le in T0. change 0%Q with (inject_Z 0) in T0. rewrite Qfloor_Z in T0.
    apply Qceiling_resp_le in T1. rewrite Qceiling_Z in T1. lia.
  - unfold shares. rewrite PO_WHOLE_SHARES_sum. rewrite (Qfloor_comp _ _ S). apply Qfloor_Z.
Qed.
