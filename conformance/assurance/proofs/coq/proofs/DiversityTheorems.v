(* Theorems about Diversity.v (DV-GREEDY). *)
From Coq Require Import Lqa.
From Kvspec Require Export ListFacts Diversity.

Section Growth.
  Context {R : Type} `{Number R} (lambda : R) (similarity : Z -> Z -> R).

  Notation grow := (grow lambda similarity).
  Notation best := (best lambda).

  Lemma best_in open c : best open = Some c -> In c open.
  Proof.
    revert c; induction open as [|d rest IH]; intros c; cbn; [easy|]. destruct (best rest) as [e|]; intros E; injection E as <-.
    - destruct (chosen_before lambda d e); [now left|right; now apply IH].
    - now left.
  Qed.

  Lemma best_none open : best open = None -> open = [].
  Proof. destruct open as [|d rest]; cbn; [easy|]. now destruct (best rest). Qed.

  Lemma without_places i open : map place (without similarity i open) = filter (fun p => negb (p =? i)) (map place open).
  Proof.
    unfold without. rewrite map_map. transitivity (map place (filter (fun c => negb (place c =? i)) open)); [reflexivity|].
    induction open as [|c open IH]; cbn; [reflexivity|]. destruct (place c =? i); cbn; now rewrite IH.
  Qed.

  (* Only open tokens are chosen, and none twice. *)
  Theorem DV_GREEDY_chooses_open_tokens rounds : forall open, incl (grow rounds open) (map place open).
  Proof.
    induction rounds as [|rounds IH]; intros open p Hp; cbn in Hp; [easy|]. destruct (best open) as [c|] eqn:E; [|easy].
    destruct Hp as [<-|Hp]; [now apply in_map, best_in|]. apply IH in Hp. rewrite without_places in Hp.
    now apply filter_In in Hp.
  Qed.

  Theorem DV_GREEDY_none_twice rounds : forall open, NoDup (grow rounds open).
  Proof.
    induction rounds as [|rounds IH]; intros open; cbn; [constructor|]. destruct (best open) as [c|] eqn:E; [|constructor].
    constructor; [|apply IH]. intros Hc. apply DV_GREEDY_chooses_open_tokens in Hc. rewrite without_places in Hc.
    apply filter_In in Hc as [_ Hc]. now rewrite Z.eqb_refl in Hc.
  Qed.

  (* As many as were asked for, while there are any. *)
  Theorem DV_GREEDY_number rounds : forall open, NoDup (map place open) ->
    length (grow rounds open) = Nat.min rounds (length open).
  Proof.
    induction rounds as [|rounds IH]; intros open N; cbn; [reflexivity|]. destruct (best open) as [c|] eqn:E.
    - pose proof (best_in _ _ E) as Hc. cbn. rewrite IH.
      + assert (length open = S (length (without similarity (place c) open))) as ->; [|reflexivity].
        rewrite <- (map_length place open), <- (map_length place (without _ _ _)), without_places.
        apply (in_map place) in Hc. clear - N Hc. induction (map place open) as [|p l IHl]; [easy|].
        inversion N as [|? ? Out N']; subst. cbn. destruct (Z.eqb_spec p (place c)) as [->|Ne]; cbn; f_equal.
        * clear - Out. induction l as [|q l IHl]; cbn; [reflexivity|]. destruct (Z.eqb_spec q (place c)) as [->|]; cbn.
          -- exfalso. apply Out. now left.
          -- f_equal. apply IHl. intros Hq. apply Out. now right.
        * apply IHl; [assumption|]. destruct Hc; [congruence|assumption].
      + rewrite without_places. now apply NoDup_filter.
    - apply best_none in E as ->. reflexivity.
  Qed.
End Growth.

(* lambda = 0: redundancy counts for nothing. Whoever is chosen has the higher score, or the lower position of two equal
   ones, than whoever is not: the choice is PO-TOP-UNITS'. *)
Lemma gain_0 (c : candidate Q) : (gain 0 c == worth c)%Q.
Proof. unfold gain. cbn [minus times rational]. ring. Qed.

Lemma less_0 (c d : candidate Q) : ltb (gain 0%Q d) (gain 0%Q c) = ltb (worth d) (worth c).
Proof. apply Bool.eq_iff_eq_true. rewrite !rational_less, !gain_0. reflexivity. Qed.

Notation by_score := (ties_by_place (fun c d : candidate Q => ltb (worth d) (worth c)) place).

Lemma chosen_before_0 (c d : candidate Q) : chosen_before 0%Q c d = by_score c d.
Proof. unfold chosen_before, ties_by_place. now rewrite !less_0. Qed.

Lemma by_score_total c d : by_score c d = true \/ by_score d c = true.
Proof. apply ties_total. Qed.

Lemma by_score_trans c d e : by_score c d = true -> by_score d e = true -> by_score c e = true.
Proof. apply ties_trans; intros; [now apply ltb_asym|rewrite or_comm; now apply ltb_cotrans]. Qed.

Lemma best_is_best open : forall c d, best 0%Q open = Some c -> In d open -> by_score c d = true.
Proof.
  assert (forall c, by_score c c = true) as Refl by (intros c; now destruct (by_score_total c c)).
  induction open as [|e rest IH]; intros c d E Hd; [easy|]. cbn in E. destruct (best 0%Q rest) as [f|] eqn:F.
  - rewrite chosen_before_0 in E. specialize (IH f). destruct (by_score e f) eqn:B; injection E as <-.
    + destruct Hd as [<-|Hd]; [apply Refl|]. apply by_score_trans with f; auto.
    + destruct Hd as [<-|Hd]; [destruct (by_score_total e f); congruence|auto].
  - injection E as <-. apply best_none in F as ->. destruct Hd as [<-|[]]. apply Refl.
Qed.

Theorem DV_GREEDY_lambda_0 similarity rounds : forall open c d, NoDup (map place open) -> In c open -> In d open ->
  In (place c) (grow 0%Q similarity rounds open) -> ~ In (place d) (grow 0%Q similarity rounds open) ->
  (worth d < worth c)%Q \/ (~ (worth c < worth d)%Q /\ place c <= place d).
Proof.
  enough (forall open c d, NoDup (map place open) -> In c open -> In d open ->
    In (place c) (grow 0%Q similarity rounds open) -> ~ In (place d) (grow 0%Q similarity rounds open) ->
    by_score c d = true) as E.
  { intros open c d N Hc Hd Gc Gd. specialize (E open c d N Hc Hd Gc Gd).
    apply ties_true in E as [E|[E P]]; cbv beta in E; [left; now apply rational_less|right].
    rewrite <- not_true_iff_false, rational_less in E. auto. }
  induction rounds as [|rounds IH]; intros open c d N Hc Hd Gc Gd; cbn in *; [easy|].
  destruct (best 0%Q open) as [b|] eqn:B; [|easy]. pose proof (best_in _ _ _ B) as Hb.
  assert (forall x y, In x open -> In y open -> place x = place y -> x = y) as One.
  { clear - N. induction open as [|z l IH]; cbn in *; intros x y Hx Hy P; [easy|].
    inversion N as [|? ? Out N']; subst. destruct Hx as [<-|Hx], Hy as [<-|Hy]; auto.
    - exfalso. apply Out. rewrite P. now apply in_map.
    - exfalso. apply Out. rewrite <- P. now apply in_map. }
  destruct Gc as [Gc|Gc].
  - apply One in Gc as <-; [|assumption..]. now apply (best_is_best open).
  - assert (forall x, In x open -> place x <> place b -> In (nearer similarity (place b) x) (without similarity (place b) open)) as Still.
    { intros x Hx Nx. unfold without. apply in_map, filter_In. split; [assumption|]. apply negb_true_iff, Z.eqb_neq, Nx. }
    assert (place c <> place b) as Nc.
    { intros E. pose proof (DV_GREEDY_none_twice 0%Q similarity (S rounds) open) as D. cbn in D. rewrite B in D.
      inversion D as [|? ? Out D']; subst. apply Out. rewrite E in Gc. exact Gc. }
    assert (place d <> place b) as Nd by (intros E; apply Gd; left; congruence).
    change (by_score (nearer similarity (place b) c) (nearer similarity (place b) d) = true).
    apply (IH (without similarity (place b) open)); auto.
    + rewrite without_places. now apply NoDup_filter.
    + intros G. apply Gd. now right.
Qed.
