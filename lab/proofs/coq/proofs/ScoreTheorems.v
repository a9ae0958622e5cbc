(* Theorems about Score.v, over the rationals; log1p is any function. *)
From Coq Require Import Lqa.
From Kvspec Require Export ListFacts Score.

(* alpha = 0: the score is D itself. *)
Theorem CC_SCORE_alpha_0 (D M : Q) : (0 <= D)%Q -> best_path 0%Q D M = D.
Proof.
  intros HD. unfold best_path, greatest. cbn [times rational]. destruct (ltb D (0 * M)%Q) eqn:E; [|reflexivity].
  apply rational_less in E. lra.
Qed.

Theorem CC_SCORE_is_the_better_path (alpha D M : Q) :
  (D <= best_path alpha D M)%Q /\ (alpha * M <= best_path alpha D M)%Q
  /\ (best_path alpha D M = D \/ best_path alpha D M = alpha * M)%Q.
Proof.
  unfold best_path, greatest. cbn [times rational]. destruct (ltb D (alpha * M)%Q) eqn:E.
  - apply rational_less in E. repeat split; auto; lra.
  - apply not_true_iff_false in E. rewrite rational_less in E. apply Qnot_lt_le in E. repeat split; auto; lra.
Qed.

Lemma fold_least (rest : list Q) : forall l, (fold_left least rest l <= l)%Q /\ Forall (fun x => fold_left least rest l <= x)%Q rest.
Proof.
  induction rest as [|y rest IH]; intros l; cbn [fold_left]; [split; [apply Qle_refl|constructor]|].
  destruct (IH (least l y)) as [L F]. assert (least l y <= l /\ least l y <= y)%Q as [A B].
  { unfold least. destruct (ltb y l) eqn:E; [apply rational_less in E|apply not_true_iff_false in E; rewrite rational_less in E]; lra. }
  split; [lra|]. constructor; [lra|assumption].
Qed.

Lemma fold_greatest (rest : list Q) : forall l, (l <= fold_left greatest rest l)%Q /\ Forall (fun x => x <= fold_left greatest rest l)%Q rest.
Proof.
  induction rest as [|y rest IH]; intros l; cbn [fold_left]; [split; [apply Qle_refl|constructor]|].
  destruct (IH (greatest l y)) as [L F]. assert (l <= greatest l y /\ y <= greatest l y)%Q as [A B].
  { unfold greatest. destruct (ltb l y) eqn:E; [apply rational_less in E|apply not_true_iff_false in E; rewrite rational_less in E]; lra. }
  split; [lra|]. constructor; [lra|assumption].
Qed.

Section Normalised.
  Variables (epsilon : Q) (log1p : Q -> Q).
  Hypothesis positive_epsilon : (0 < epsilon)%Q.

  Theorem CC_NORMALISED_IMPACT_range M_bar :
    Forall (fun x => 0 <= x < 1)%Q (normalised_impact epsilon log1p M_bar).
  Proof.
    unfold normalised_impact. destruct (map log1p M_bar) as [|l rest]; [constructor|].
    destruct (fold_least rest l) as [L FL], (fold_greatest rest l) as [G FG].
    set (low := fold_left least rest l) in *. set (high := fold_left greatest rest l) in *. clearbody low high.
    apply Forall_map, Forall_forall. intros x Hx. cbn [over minus plus rational].
    assert (low <= x /\ x <= high)%Q as [A B].
    { rewrite Forall_forall in FL, FG. destruct Hx as [->|Hx]; auto. }
    assert (0 < high - low + epsilon)%Q as P by lra. split.
    - apply Qle_shift_div_l; lra.
    - apply Qlt_shift_div_r; lra.
  Qed.

  (* Each logarithm, less the least of them, by their range and epsilon. *)
  Theorem CC_NORMALISED_IMPACT_formula M_bar : M_bar <> [] -> exists low high,
    In low (map log1p M_bar) /\ In high (map log1p M_bar) /\ Forall (fun x => low <= log1p x <= high)%Q M_bar
    /\ normalised_impact epsilon log1p M_bar = map (fun x => (log1p x - low) / (high - low + epsilon))%Q M_bar.
  Proof.
    destruct M_bar as [|m rest]; [easy|]. intros _. unfold normalised_impact. cbn [map].
    set (l := log1p m). set (logs := map log1p rest).
    exists (fold_left least logs l), (fold_left greatest logs l).
    assert (forall f : Q -> Q -> Q, (forall x y, f x y = x \/ f x y = y) -> forall logs l, In (fold_left f logs l) (l :: logs)) as One.
    { intros f Hf. induction logs0 as [|x logs0 IH]; intros y; cbn [fold_left]; [now left|].
      destruct (IH (f y x)) as [E|I]; [|right; now right]. rewrite <- E. destruct (Hf y x) as [-> | ->]; [now left|right; now left]. }
    split; [apply One; intros x y; unfold least; destruct ltb; auto|].
    split; [apply One; intros x y; unfold greatest; destruct ltb; auto|].
    destruct (fold_least logs l) as [L FL], (fold_greatest logs l) as [G FG]. split.
    - constructor; [auto|]. unfold logs in *. rewrite Forall_map in FL, FG. rewrite Forall_forall in *.
      intros x Hx. split; [now apply FL|now apply FG].
    - cbn [over minus plus rational map]. unfold logs. now rewrite map_map.
  Qed.

  (* The order of impacts is kept: with a logarithm that does not fall, the higher impact has no lower value. *)
  Theorem CC_NORMALISED_IMPACT_monotone M_bar x y a b : (forall u v, u <= v -> log1p u <= log1p v)%Q -> (x <= y)%Q ->
    In (x, a) (combine M_bar (normalised_impact epsilon log1p M_bar)) ->
    In (y, b) (combine M_bar (normalised_impact epsilon log1p M_bar)) -> (a <= b)%Q.
  Proof.
    intros Up XY. destruct M_bar as [|m rest] eqn:E; [easy|]. rewrite <- E.
    destruct (CC_NORMALISED_IMPACT_formula M_bar) as (low & high & _ & _ & F & ->); [now rewrite E|].
    assert (low <= high)%Q as LH by (rewrite E in F; inversion F; lra). clear E.
    assert (forall x a, In (x, a) (combine M_bar (map (fun x => (log1p x - low) / (high - low + epsilon))%Q M_bar)) ->
            a = (log1p x - low) / (high - low + epsilon))%Q as Is.
    { clear. induction M_bar as [|m l IH]; cbn; [easy|]. intros x a [E|I]; [now injection E as <- <-|auto]. }
    intros Ha Hb. rewrite (Is _ _ Ha), (Is _ _ Hb). unfold Qdiv. specialize (Up x y XY).
    apply Qmult_le_compat_r; [lra|]. apply Qinv_le_0_compat. lra.
  Qed.

  (* FC13: uniform impact adds no constant: it gives 0, so the score is D. *)
  Theorem CC_NORMALISED_IMPACT_uniform (M : Q) k :
    Forall (fun x => x == 0)%Q (normalised_impact epsilon log1p (repeat M k)).
  Proof.
    unfold normalised_impact. replace (map log1p (repeat M k)) with (repeat (log1p M) k) by (induction k; cbn; congruence).
    destruct k as [|k]; [constructor|]. cbn [repeat].
    assert (forall f : Q -> Q -> Q, (forall x, f x x = x) -> fold_left f (repeat (log1p M) k) (log1p M) = log1p M) as E.
    { intros f Hf. induction k as [|k IH]; cbn; [reflexivity|]. now rewrite Hf. }
    rewrite !E; [..|intros x; unfold greatest; now destruct ltb|intros x; unfold least; now destruct ltb].
    apply Forall_map, Forall_forall. intros x [<-|Hx]; [|apply repeat_spec in Hx; subst x];
      cbn [over minus plus rational]; unfold Qdiv, Qminus; rewrite Qplus_opp_r; apply Qmult_0_l.
  Qed.
End Normalised.
