(* Eviction equals masking, over the reals: attention to what is kept is attention to everything with -M at the
   evicted tokens, up to a constant times exp(-M); with weight 0 at them it is the same number. *)
From Coq Require Import Bool.
From Coq Require Import Lia.
From Kvspec Require Export Attention.

Section Sums.
  Context {A : Type}.
  Implicit Types (w f : A -> R) (l : list A).

  Lemma weighted_app w f l r : weighted w f (l ++ r) = weighted w f l + weighted w f r.
  Proof. unfold weighted. induction l as [|t l IH]; cbn; [ring|]. rewrite IH. ring. Qed.

  Lemma weighted_partition w f (p : A -> bool) l :
    weighted w f l = weighted w f (filter p l) + weighted w f (filter (fun t => negb (p t)) l).
  Proof.
    unfold weighted. induction l as [|t l IH]; cbn; [ring|]. destruct (p t); cbn; rewrite IH; ring.
  Qed.

  Lemma weighted_ext w w' f l : (forall t, In t l -> w t = w' t) -> weighted w f l = weighted w' f l.
  Proof.
    intros E. unfold weighted. induction l as [|t l IH]; cbn; [reflexivity|].
    rewrite (E t) by now left. rewrite IH; [reflexivity|]. intros; apply E; now right.
  Qed.

  Lemma weighted_scale c w f l : weighted (fun t => c * w t) f l = c * weighted w f l.
  Proof. unfold weighted. induction l as [|t l IH]; cbn; [ring|]. rewrite IH. ring. Qed.

  Lemma weighted_zero f l : weighted (fun _ => 0) f l = 0.
  Proof. unfold weighted. induction l as [|t l IH]; cbn; [reflexivity|]. rewrite IH. ring. Qed.

  Lemma weighted_nonneg w l : (forall t, 0 <= w t) -> 0 <= weighted w (fun _ => 1) l.
  Proof. intros P. unfold weighted. induction l as [|t l IH]; cbn; [lra|]. specialize (P t). lra. Qed.

  Lemma weighted_positive w l : (forall t, 0 < w t) -> l <> [] -> 0 < weighted w (fun _ => 1) l.
  Proof.
    intros P. destruct l as [|t l]; [easy|]. intros _. cbn. specialize (P t) as Pt.
    pose proof (weighted_nonneg w l (fun t => Rlt_le _ _ (P t))) as N. unfold weighted in *. cbn. lra.
  Qed.

  (* A mean of values within V lies within V. *)
  Lemma weighted_bound w f V l : (forall t, 0 <= w t) -> (forall t, In t l -> Rabs (f t) <= V) ->
    Rabs (weighted w f l) <= V * weighted w (fun _ => 1) l.
  Proof.
    intros P B. unfold weighted. induction l as [|t l IH]; cbn; [rewrite Rabs_R0; lra|].
    eapply Rle_trans; [apply Rabs_triang|]. rewrite Rabs_mult, (Rabs_pos_eq (w t)) by apply P.
    assert (w t * Rabs (f t) <= w t * V) by (apply Rmult_le_compat_l; [apply P|apply B; now left]).
    assert (Rabs (fold_right Rplus 0 (map (fun t => w t * f t) l)) <= V * fold_right Rplus 0 (map (fun t => w t * 1) l))
      by (apply IH; intros; apply B; now right). lra.
  Qed.

  Lemma weighted_between w lo hi l : (forall t, In t l -> lo <= w t <= hi) ->
    lo * INR (length l) <= weighted w (fun _ => 1) l <= hi * INR (length l).
  Proof.
    intros B. induction l as [|t l IH]; [cbn; lra|]. cbn [length]. rewrite S_INR.
    specialize (B t (or_introl eq_refl)) as Bt. assert (forall u, In u l -> lo <= w u <= hi) as Bl by (intros; apply B; now right).
    specialize (IH Bl). unfold weighted in *. cbn. lra.
  Qed.
End Sums.

Section Masking.
  Context {A : Type} (logit value : A -> R) (kept : A -> bool) (all : list A).

  Let stays := filter kept all.
  Let goes := filter (fun t => negb (kept t)) all.
  Let D_k := weighted (weight logit) (fun _ => 1) stays.
  Let D_e := weighted (weight logit) (fun _ => 1) goes.

  Lemma weight_positive t : 0 < weight logit t.
  Proof. apply exp_pos. Qed.

  Lemma masked_sum M f : weighted (masked_weight logit M kept) f all
    = weighted (weight logit) f stays + exp (- M) * weighted (weight logit) f goes.
  Proof.
    rewrite (weighted_partition _ _ kept), <- weighted_scale. unfold stays, goes. f_equal; apply weighted_ext; intros t Ht.
    - apply filter_In in Ht as [_ E]. unfold masked_weight. now rewrite E, Rplus_0_r.
    - apply filter_In in Ht as [_ E]. apply negb_true_iff in E. unfold masked_weight, weight. rewrite E, exp_plus. ring.
  Qed.

  Lemma hidden_sum f : weighted (hidden_weight logit kept) f all = weighted (weight logit) f stays.
  Proof.
    rewrite (weighted_partition _ _ kept). fold stays goes. rewrite (weighted_ext _ (weight logit) f stays),
      (weighted_ext _ (fun _ => 0) f goes), weighted_zero; [ring|..]; intros t Ht; apply filter_In in Ht as [_ E]; unfold hidden_weight.
    - apply negb_true_iff in E. now rewrite E.
    - now rewrite E.
  Qed.

  (* Weight 0 at the evicted tokens: the same number. *)
  Theorem CC_COMPACT_equals_hiding : hidden logit value kept all = attention logit value stays.
  Proof. unfold hidden, attention, average. now rewrite !hidden_sum. Qed.

  Variable V : R.
  Hypothesis bounded : forall t, In t all -> Rabs (value t) <= V.
  Hypothesis something_stays : stays <> [].

  (* -M at the evicted tokens: off by at most 2 V exp(-M) times the evicted over the kept weight. *)
  Theorem CC_COMPACT_masking_bound M :
    Rabs (masked logit value M kept all - attention logit value stays) <= 2 * V * (D_e / D_k) * exp (- M).
  Proof.
    unfold masked, attention, average. rewrite !masked_sum. fold D_k D_e.
    set (N_k := weighted (weight logit) value stays). set (N_e := weighted (weight logit) value goes).
    assert (0 < D_k) as Pk by (apply weighted_positive; [apply weight_positive|assumption]).
    assert (0 <= D_e) as Pe by (apply weighted_nonneg; intros; apply Rlt_le, weight_positive).
    assert (Rabs N_k <= V * D_k) as Bk.
    { apply weighted_bound; [intros; apply Rlt_le, weight_positive|]. intros t Ht. apply filter_In in Ht as [Ht _]. auto. }
    assert (Rabs N_e <= V * D_e) as Be.
    { apply weighted_bound; [intros; apply Rlt_le, weight_positive|]. intros t Ht. apply filter_In in Ht as [Ht _]. auto. }
    pose proof (exp_pos (- M)) as Pm. set (m := exp (- M)) in *. clearbody m N_k N_e D_k D_e.
    assert (0 < D_k + m * D_e) as P by (pose proof (Rmult_le_pos m D_e); lra).
    replace ((N_k + m * N_e) / (D_k + m * D_e) - N_k / D_k) with (m * (N_e * D_k - N_k * D_e) / (D_k * (D_k + m * D_e))) by (field; lra).
    unfold Rdiv. rewrite !Rabs_mult, Rabs_inv, Rabs_mult, (Rabs_pos_eq m), (Rabs_pos_eq D_k), (Rabs_pos_eq (D_k + m * D_e)) by lra.
    assert (Rabs (N_e * D_k - N_k * D_e) <= 2 * V * D_e * D_k) as B.
    { eapply Rle_trans; [apply Rabs_triang|]. rewrite Rabs_Ropp, !Rabs_mult, (Rabs_pos_eq D_k), (Rabs_pos_eq D_e) by lra.
      pose proof (Rmult_le_compat_r D_k _ _ (Rlt_le _ _ Pk) Be). pose proof (Rmult_le_compat_r D_e _ _ Pe Bk). lra. }
    assert (0 <= 2 * V * D_e * D_k) as Pb by (eapply Rle_trans; [apply Rabs_pos|exact B]).
    replace (2 * V * (D_e * / D_k) * m) with (m * (2 * V * D_e * D_k) * / (D_k * D_k)) by (field; lra).
    apply Rmult_le_compat.
    - apply Rmult_le_pos; [lra|apply Rabs_pos].
    - apply Rlt_le, Rinv_0_lt_compat, Rmult_lt_0_compat; lra.
    - apply Rmult_le_compat_l; lra.
    - apply Rinv_le_contravar; [apply Rmult_lt_0_compat; lra|]. apply Rmult_le_compat_l; [lra|].
      pose proof (Rmult_le_pos m D_e). lra.
  Qed.

  (* Hence zero in the limit. *)
  Theorem CC_COMPACT_masking_limit epsilon : 0 < epsilon ->
    exists M_0, forall M, M_0 <= M -> Rabs (masked logit value M kept all - attention logit value stays) <= epsilon.
  Proof.
    intros He. set (C := 2 * V * (D_e / D_k)). exists (ln ((Rabs C + 1) / epsilon)). intros M HM.
    eapply Rle_trans; [apply CC_COMPACT_masking_bound|]. fold C.
    assert (0 < (Rabs C + 1) / epsilon) as P by (pose proof (Rabs_pos C); apply Rdiv_lt_0_compat; lra).
    assert (exp (- M) <= epsilon / (Rabs C + 1)) as E.
    { replace (epsilon / (Rabs C + 1)) with (exp (- ln ((Rabs C + 1) / epsilon))).
      - destruct HM as [HM|HM]; [left; apply exp_increasing; lra|right; f_equal; lra].
      - rewrite exp_Ropp, exp_ln by assumption. pose proof (Rabs_pos C). field. lra. }
    pose proof (exp_pos (- M)) as Pm. pose proof (Rle_abs C). pose proof (Rabs_pos C).
    eapply Rle_trans; [apply Rmult_le_compat_r; [lra|eassumption]|].
    eapply Rle_trans; [apply Rmult_le_compat_l; [assumption|exact E]|].
    apply Rmult_le_reg_r with (Rabs C + 1); [lra|]. unfold Rdiv. rewrite !Rmult_assoc, Rinv_l, Rmult_1_r by lra.
    rewrite (Rmult_comm epsilon). apply Rmult_le_compat_r; lra.
  Qed.

  (* A bound without sums: logits within B. *)
  Theorem CC_COMPACT_masking_uniform_bound B M : (forall t, In t all -> Rabs (logit t) <= B) -> 0 <= V ->
    Rabs (masked logit value M kept all - attention logit value stays) <= 2 * V * (INR (length all) * exp (2 * B)) * exp (- M).
  Proof.
    intros HB HV. eapply Rle_trans; [apply CC_COMPACT_masking_bound|].
    apply Rmult_le_compat_r; [apply Rlt_le, exp_pos|]. apply Rmult_le_compat_l; [lra|].
    assert (forall l, incl l all -> exp (- B) * INR (length l) <= weighted (weight logit) (fun _ => 1) l <= exp B * INR (length l)) as W.
    { intros l I. apply weighted_between. intros t Ht. apply I, HB in Ht. unfold weight.
      assert (- B <= logit t <= B) as [L U].
      { pose proof (Rle_abs (logit t)). pose proof (Rle_abs (- logit t)). rewrite Rabs_Ropp in H0. lra. }
      split; [destruct L as [L|E]|destruct U as [U|E]]; try (rewrite E; apply Rle_refl); now apply Rlt_le, exp_increasing. }
    assert (incl stays all /\ incl goes all) as [Ik Ie] by (split; intros t Ht; now apply filter_In in Ht).
    destruct (W goes Ie) as [_ Ue], (W stays Ik) as [Lk _]. fold D_e in Ue. fold D_k in Lk.
    assert (1 <= INR (length stays)) as One.
    { change 1 with (INR 1). apply le_INR. destruct stays; [easy|cbn; lia]. }
    assert (INR (length goes) <= INR (length all)) as Few.
    { apply le_INR. unfold goes. clear. induction all as [|t l IH]; cbn; [lia|]. destruct (kept t); cbn; lia. }
    pose proof (exp_pos B) as PB. pose proof (exp_pos (- B)) as PB'.
    assert (0 < D_k) as Pk by (apply weighted_positive; [apply weight_positive|assumption]).
    assert (exp (- B) <= D_k) as Lk'.
    { eapply Rle_trans; [|exact Lk]. rewrite <- (Rmult_1_r (exp (- B))) at 1. apply Rmult_le_compat_l; lra. }
    assert (D_e <= exp B * INR (length all)) as Ue'.
    { eapply Rle_trans; [exact Ue|]. apply Rmult_le_compat_l; lra. }
    apply Rmult_le_reg_r with D_k; [assumption|]. unfold Rdiv. rewrite Rmult_assoc, Rinv_l, Rmult_1_r by lra.
    eapply Rle_trans; [exact Ue'|].
    replace (exp B * INR (length all)) with (INR (length all) * exp (2 * B) * exp (- B)).
    - apply Rmult_le_compat_l; [|assumption]. apply Rmult_le_pos; [apply pos_INR|apply Rlt_le, exp_pos].
    - rewrite Rmult_assoc, <- exp_plus. replace (2 * B + - B) with B by ring. ring.
  Qed.
End Masking.

(* Chunks compose: attention to two parts is the mean of the attention to each, by their sums of weights. *)
Theorem CC_ATTENTION_chunks_compose {A} (logit value : A -> R) first second :
  first <> [] -> second <> [] ->
  let D := weighted (weight logit) (fun _ => 1) in
  attention logit value (first ++ second)
  = (D first * attention logit value first + D second * attention logit value second) / (D first + D second).
Proof.
  intros F S D. unfold attention, average, D. rewrite !weighted_app.
  assert (0 < weighted (weight logit) (fun _ => 1) first) by (apply weighted_positive; [apply weight_positive|assumption]).
  assert (0 < weighted (weight logit) (fun _ => 1) second) by (apply weighted_positive; [apply weight_positive|assumption]).
  field. lra.
Qed.

(* Logits count up to a constant: why an implementation may subtract the maximum. *)
Theorem CC_ATTENTION_shift {A} (logit value : A -> R) c (l : list A) :
  l <> [] -> attention (fun t => logit t + c) value l = attention logit value l.
Proof.
  intros L. unfold attention, average.
  assert (forall f, weighted (weight (fun t => logit t + c)) f l = exp c * weighted (weight logit) f l) as E.
  { intros f. rewrite <- weighted_scale. apply weighted_ext. intros t _. unfold weight. rewrite exp_plus. ring. }
  rewrite !E. pose proof (exp_pos c). pose proof (weighted_positive (weight logit) l (weight_positive logit) L). field. lra.
Qed.

(* ---- all layers ---- *)

(* With -M: a distance on states, in which one layer moves no further than L times its input, and K times the largest
   difference of its heads; logits and values are bounded over all states. *)
Section Layers.
  Context {X A : Type} (d : X -> X -> R).
  Hypothesis d_triangle : forall x y z, d x z <= d x y + d y z.
  Hypothesis d_same : forall x, d x x = 0.

  Variables (B V K L : R) (n : nat).
  Hypotheses (HB : 0 <= B) (HV : 0 <= V) (HK : 0 <= K) (HL : 0 <= L).

  Definition well_behaved (l : layer X A) : Prop :=
    (forall h, In h (heads l) -> filter (kept h) (tokens h) <> [] /\ (length (tokens h) <= n)%nat
       /\ forall x t, In t (tokens h) -> Rabs (logit h x t) <= B /\ Rabs (value h x t) <= V)
    /\ (forall x gave gave' e, length gave = length (heads l) -> Forall2 (fun a b => Rabs (a - b) <= e) gave gave' -> 0 <= e ->
          d (output l x gave) (output l x gave') <= K * e)
    /\ (forall x y, d (output l x (map (compacted_head x) (heads l))) (output l y (map (compacted_head y) (heads l))) <= L * d x y).

  Let C := 2 * V * (INR n * exp (2 * B)).

  Lemma one_layer (l : layer X A) M x : well_behaved l ->
    d (output l x (map (masked_head M x) (heads l))) (output l x (map (compacted_head x) (heads l))) <= K * (C * exp (- M)).
  Proof.
    intros (Hh & Ho & _). apply Ho; [apply map_length|..].
    - clear Ho. revert Hh. induction (heads l) as [|h hs IH]; intros Hh; cbn; constructor; [|apply IH; intros; apply Hh; now right].
      destruct (Hh h (or_introl eq_refl)) as (S & N & T). unfold masked_head, compacted_head.
      eapply Rle_trans; [apply CC_COMPACT_masking_uniform_bound with (V := V) (B := B); try assumption; intros t Ht; now apply T|].
      apply Rmult_le_compat_r; [apply Rlt_le, exp_pos|]. unfold C. apply Rmult_le_compat_l; [lra|].
      apply Rmult_le_compat_r; [apply Rlt_le, exp_pos|]. now apply le_INR.
    - unfold C. repeat apply Rmult_le_pos; try lra; try apply pos_INR; apply Rlt_le, exp_pos.
  Qed.

  (* By induction over the layers: bounded by a constant, that M has no part in, times exp(-M). *)
  Theorem CC_COMPACT_layers_masking_bound (layers : list (layer X A)) : Forall well_behaved layers ->
    exists bound, 0 <= bound /\ forall M x, d (run (masked_head M) layers x) (run compacted_head layers x) <= bound * exp (- M).
  Proof.
    intros W. enough (forall e, 0 <= e -> exists bound, 0 <= bound /\ forall M x y, d x y <= e * exp (- M) ->
      d (run (masked_head M) layers x) (run compacted_head layers y) <= bound * exp (- M)) as E.
    { destruct (E 0 (Rle_refl 0)) as (b & Hb & P). exists b. split; [assumption|]. intros M x. apply P. rewrite d_same. lra. }
    induction W as [|l layers Hl W IH]; intros e He.
    - exists e. split; [assumption|]. intros M x y D. exact D.
    - destruct (IH (K * C + L * e)) as (b & Hb & P).
      { apply Rplus_le_le_0_compat; [apply Rmult_le_pos; [assumption|]|now apply Rmult_le_pos].
        unfold C. repeat apply Rmult_le_pos; try lra; try apply pos_INR; apply Rlt_le, exp_pos. }
      exists b. split; [assumption|]. intros M x y D. cbn [run fold_left]. apply P.
      eapply Rle_trans; [apply d_triangle with (y := output l x (map (compacted_head x) (heads l)))|].
      pose proof (one_layer l M x Hl) as One. destruct Hl as (_ & _ & Lip). specialize (Lip x y).
      pose proof (Rmult_le_compat_l L _ _ HL D). lra.
  Qed.

  Theorem CC_COMPACT_layers_masking_limit (layers : list (layer X A)) epsilon : Forall well_behaved layers -> 0 < epsilon ->
    exists M_0, forall M x, M_0 <= M -> d (run (masked_head M) layers x) (run compacted_head layers x) <= epsilon.
  Proof.
    intros W He. destruct (CC_COMPACT_layers_masking_bound layers W) as (b & Hb & P).
    exists (ln ((b + 1) / epsilon)). intros M x HM. eapply Rle_trans; [apply P|].
    assert (exp (- M) <= epsilon / (b + 1)) as E.
    { replace (epsilon / (b + 1)) with (exp (- ln ((b + 1) / epsilon))).
      - destruct HM as [HM|HM]; [left; apply exp_increasing; lra|right; f_equal; lra].
      - rewrite exp_Ropp, exp_ln; [field; lra|apply Rdiv_lt_0_compat; lra]. }
    eapply Rle_trans; [apply Rmult_le_compat_l; [assumption|exact E]|].
    apply Rmult_le_reg_r with (b + 1); [lra|]. unfold Rdiv. rewrite !Rmult_assoc, Rinv_l, Rmult_1_r by lra.
    rewrite (Rmult_comm epsilon). apply Rmult_le_compat_r; lra.
  Qed.
End Layers.

(* A plain sum of heads moves no further than their number times the largest difference: such layers exist. *)
Lemma sum_of_heads (x : R) gave gave' e n : length gave = n -> Forall2 (fun a b => Rabs (a - b) <= e) gave gave' ->
  Rabs ((x + fold_right Rplus 0 gave) - (x + fold_right Rplus 0 gave')) <= INR n * e.
Proof.
  intros <- F. replace (x + fold_right Rplus 0 gave - (x + fold_right Rplus 0 gave')) with (fold_right Rplus 0 gave - fold_right Rplus 0 gave') by ring.
  induction F as [|a b l r H F IH]; [cbn; rewrite Rminus_0_r, Rabs_R0; lra|]. cbn [fold_right length]. rewrite S_INR.
  replace (a + fold_right Rplus 0 l - (b + fold_right Rplus 0 r)) with ((a - b) + (fold_right Rplus 0 l - fold_right Rplus 0 r)) by ring.
  eapply Rle_trans; [apply Rabs_triang|]. lra.
Qed.
