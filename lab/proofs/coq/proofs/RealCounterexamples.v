(* False properties that speak of logarithms, roots and the logistic (FC numbers as in Counterexamples.v). FC10 is about the
   model, with real numbers. The model has no graph and no rarity: FC8, FC12, FC19 and FC20 are about formulas written out
   here, and count for no item. *)
From Coq Require Import Reals Lra List.
From Kvspec Require Import ListFacts Score.
Open Scope R_scope.

#[local] Instance real : Number R := {
  zero := 0; plus := Rplus; minus := Rminus; times := Rmult; over := Rdiv; of_Z := IZR;
  ltb x y := if Rlt_dec x y then true else false
}.

Lemma exp_power n x : exp x ^ n = exp (INR n * x).
Proof.
  induction n as [|n IH]; [cbn; now rewrite Rmult_0_l, exp_0|]. rewrite S_INR. cbn [pow]. rewrite IH, <- exp_plus.
  f_equal. ring.
Qed.

(* FC8 (CC-CRYSTALLIZATION): "a trunk whose degree grows is not evicted for it". Degrees (g, 1.9, 1.8, 1.9, 1.8), and g's
   M~ is 0.984. With g = 1.3 its score beats both trunks of degree 1.9; with g = 1.7 both of them beat it. *)
Definition logistic (x : R) : R := 1 / (1 + exp (- x)).
Definition mean (l : list R) : R := fold_right Rplus 0 l / INR (length l).
Definition sigma (l : list R) : R := sqrt (mean (map (fun x => (x - mean l) * (x - mean l)) l)).
Definition D (l : list R) (x : R) : R := logistic (5 * ((x - mean l) / sigma l)).
Definition degrees (g : R) : list R := (g :: 19 / 10 :: 18 / 10 :: 19 / 10 :: 18 / 10 :: nil)%list.

Lemma sigma_of g v : mean (map (fun x => (x - mean (degrees g)) * (x - mean (degrees g))) (degrees g)) = v -> sigma (degrees g) = sqrt v.
Proof. unfold sigma. now intros ->. Qed.

Theorem FC8_a_higher_degree_evicts :
  D (degrees (13 / 10)) (19 / 10) < 984 / 1000 < D (degrees (17 / 10)) (19 / 10).
Proof.
  unfold D. rewrite (sigma_of (13 / 10) (504 / 10000)), (sigma_of (17 / 10) (56 / 10000))
    by (unfold mean, degrees; cbn; field).
  replace (mean (degrees (13 / 10))) with (174 / 100) by (unfold mean, degrees; cbn; field).
  replace (mean (degrees (17 / 10))) with (182 / 100) by (unfold mean, degrees; cbn; field).
  split; unfold logistic.
  - assert (2244 / 10000 < sqrt (504 / 10000)) as S.
    { rewrite <- (sqrt_square (2244 / 10000)) by lra. apply sqrt_lt_1; lra. }
    set (s := sqrt (504 / 10000)) in *. assert (5 * ((19 / 10 - 174 / 100) / s) < 11 / 3) as X.
    { apply Rmult_lt_reg_r with s; [lra|]. unfold Rdiv at 2. field_simplify; lra. }
    assert (exp (11 / 3) <= 61) as E.
    { destruct (Rle_or_lt (exp (11 / 3)) 61) as [|L]; [assumption|exfalso].
      assert (61 ^ 3 <= exp (11 / 3) ^ 3) as P by (apply pow_incr; lra). rewrite exp_power in P.
      replace (INR 3 * (11 / 3)) with (INR 11 * 1) in P by (cbn; field). rewrite <- exp_power in P.
      pose proof (pow_incr (exp 1) 3 11 (conj (Rlt_le _ _ (exp_pos 1)) exp_le_3)) as Q. lra. }
    apply exp_increasing in X. rewrite exp_Ropp. set (e := exp (5 * _)) in *. pose proof (exp_pos (5 * ((19 / 10 - 174 / 100) / s))) as Pe. fold e in Pe.
    assert (/ 61 < / e) by (apply Rinv_lt_contravar; [apply Rmult_lt_0_compat|]; lra).
    unfold Rdiv at 1. rewrite Rmult_1_l. rewrite <- (Rinv_inv (984 / 1000)). apply Rinv_lt_contravar; [|lra].
    apply Rmult_lt_0_compat; lra.
  - assert (sqrt (56 / 10000) < 8 / 100) as S.
    { rewrite <- (sqrt_square (8 / 100)) by lra. apply sqrt_lt_1; lra. }
    assert (0 < sqrt (56 / 10000)) as S0 by (apply sqrt_lt_R0; lra).
    set (s := sqrt (56 / 10000)) in *. assert (5 < 5 * ((19 / 10 - 182 / 100) / s)) as X.
    { apply Rmult_lt_reg_r with s; [lra|]. unfold Rdiv at 2. field_simplify; lra. }
    assert (62 <= exp 5) as E.
    { replace 5 with (INR 15 * (1 / 3)) by (cbn; field). rewrite <- exp_power.
      pose proof (exp_ineq1_le (1 / 3)). eapply Rle_trans; [|apply (pow_incr (4 / 3)); lra]. lra. }
    apply exp_increasing in X. rewrite exp_Ropp. set (e := exp (5 * _)) in *.
    assert (/ e < / 62) by (apply Rinv_lt_contravar; [apply Rmult_lt_0_compat|]; lra).
    assert (0 < / e) by (apply Rinv_0_lt_compat; lra).
    unfold Rdiv at 2. rewrite Rmult_1_l. rewrite <- (Rinv_inv (984 / 1000)). apply Rinv_lt_contravar; [|lra].
    apply Rmult_lt_0_compat; lra.
Qed.

Lemma ln_minus x y : 0 < x -> 0 < y -> ln x - ln y = ln (x / y).
Proof. intros Px Py. unfold Rdiv. rewrite ln_mult, ln_Rinv; [ring|assumption..|]. now apply Rinv_0_lt_compat. Qed.

(* FC10 (CC-NORMALISED-IMPACT): "the logarithm keeps one outlier from squashing the rest": a low one squashes the others
   above 0.8. Impacts 1 and 8 to 12; that of 8 is the least of the others. *)
Lemma fold_least_first l rest : Forall (fun x => l <= x) rest -> fold_left least rest l = l.
Proof.
  induction 1 as [|x rest Hx F IH]; [reflexivity|]. cbn [fold_left]. replace (least l x) with l; [exact IH|].
  unfold least. cbn [ltb real]. destruct (Rlt_dec x l); [lra|reflexivity].
Qed.

Lemma fold_greatest_last rest : forall l x, Forall (fun y => y <= x) (l :: rest) -> fold_left greatest (rest ++ x :: nil) l = x.
Proof.
  induction rest as [|y rest IH]; intros l x F; inversion F as [|? ? Hl F']; subst; cbn [fold_left app].
  - unfold greatest. cbn [ltb real]. destruct (Rlt_dec l x); lra.
  - inversion F' as [|? ? Hy F'']; subst. apply IH. constructor; [|assumption]. unfold greatest. destruct (ltb l y); assumption.
Qed.

Theorem CC_NORMALISED_IMPACT_FC10_a_low_outlier : exists squashed rest,
  normalised_impact (1 / 100000000) (fun x => ln (1 + x)) (1 :: 8 :: 9 :: 10 :: 11 :: 12 :: nil)%list = (0 :: squashed :: rest)%list
  /\ 4 / 5 < squashed.
Proof.
  assert (forall x y, 0 <= x <= y -> ln (1 + x) <= ln (1 + y)) as Up.
  { intros x y [Hx [L| ->]]; [|apply Rle_refl]. apply Rlt_le, ln_increasing; lra. }
  unfold normalised_impact. cbn [map].
  rewrite fold_least_first by (repeat (apply Forall_cons; [apply Up; lra|]); apply Forall_nil).
  change (ln (1 + 8) :: ln (1 + 9) :: ln (1 + 10) :: ln (1 + 11) :: ln (1 + 12) :: nil)%list
    with ((ln (1 + 8) :: ln (1 + 9) :: ln (1 + 10) :: ln (1 + 11) :: nil) ++ ln (1 + 12) :: nil)%list.
  rewrite fold_greatest_last by (repeat (apply Forall_cons; [apply Up; lra|]); apply Forall_nil).
  cbn [app map over minus plus real]. eexists _, _. split; [f_equal; unfold Rdiv; ring_simplify; reflexivity|].
  rewrite !ln_minus by lra. replace ((1 + 8) / (1 + 1)) with (9 / 2) by field. replace ((1 + 12) / (1 + 1)) with (13 / 2) by field.
  assert (0 < ln (13 / 2)) as P by (rewrite <- ln_1; apply ln_increasing; lra).
  set (e := 4 / 100000000). assert (exp e <= / (1 - e)) as Small.
  { rewrite <- (Ropp_involutive e) at 1. rewrite exp_Ropp. apply Rinv_le_contravar; [unfold e; lra|].
    pose proof (exp_ineq1_le (- e)). lra. }
  assert (4 * ln (13 / 2) + e < 5 * ln (9 / 2)) as L.
  { apply exp_lt_inv. rewrite exp_plus. replace (4 * ln (13 / 2)) with (INR 4 * ln (13 / 2)) by (cbn; ring).
    replace (5 * ln (9 / 2)) with (INR 5 * ln (9 / 2)) by (cbn; ring). rewrite <- !exp_power, !exp_ln by lra.
    eapply Rle_lt_trans; [apply Rmult_le_compat_l; [|exact Small]; lra|]. unfold e. lra. }
  apply Rmult_lt_reg_r with (ln (13 / 2) + 1 / 100000000); [lra|].
  replace (ln (9 / 2) / (ln (13 / 2) + 1 / 100000000) * (ln (13 / 2) + 1 / 100000000)) with (ln (9 / 2)) by (field; lra).
  unfold e in L. lra.
Qed.

(* FC12 (CC-TRUNK-WEIGHT): "mentions link trunks": one edge of weight w between trunks of 15 needs w > 0.75; between
   trunks of 20 no weight up to 1 is enough. *)
Definition strength (w : R) (number size size' : R) : R := w * sqrt (number / (size * size')).

Lemma strength_of_one w size : 0 < size -> strength w 1 size size = w / size.
Proof.
  intros P. unfold strength. replace (1 / (size * size)) with (/ size * / size) by (field; lra).
  rewrite sqrt_square by (apply Rlt_le, Rinv_0_lt_compat; lra). reflexivity.
Qed.

Theorem FC12_one_edge_is_not_enough w :
  (1 / 20 < strength w 1 15 15 <-> 3 / 4 < w) /\ (w <= 1 -> strength w 1 20 20 <= 1 / 20).
Proof. rewrite !strength_of_one by lra. split; [split|]; intros; lra. Qed.

(* FC19 (CC-TRUNK-WEIGHT): "a weight is at most 1": two tokens that chose each other make sqrt 2. *)
Theorem FC19_above_one : 1 < strength 1 2 1 1.
Proof.
  unfold strength. replace (2 / (1 * 1)) with 2 by field. rewrite Rmult_1_l, <- sqrt_1 at 1. apply sqrt_lt_1; lra.
Qed.

(* FC20 (CC-RARITY): "the rarity of a fact is unchanged by its density": six mentions are less rare than two. *)
Theorem FC20_more_mentions_less_rare : 1 / (1 + ln (1 + 6)) < 1 / (1 + ln (1 + 2)).
Proof.
  assert (0 < ln (1 + 2)) by (rewrite <- ln_1; apply ln_increasing; lra).
  assert (ln (1 + 2) < ln (1 + 6)) by (apply ln_increasing; lra).
  unfold Rdiv. rewrite !Rmult_1_l. apply Rinv_lt_contravar; [|lra]. apply Rmult_lt_0_compat; lra.
Qed.
