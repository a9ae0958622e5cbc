(* With -M in the logits of what was evicted, a run of many steps tends to the run that evicts, as M grows: where the parts
   of a layer, and the choice of what is read next, are continuous. *)
From Coq Require Import Bool Lia FunctionalExtensionality.
From Kvspec Require Import ListFacts.
From Kvspec Require Export DecodingTheorems.

(* ---- sequences of lists ---- *)

(* A sequence of lists of one length tends to a list, element by element. *)
Definition each {A} (rel : (nat -> A) -> A -> Prop) (u : nat -> list A) (v : list A) : Prop :=
  exists w : list (nat -> A), (forall n, u n = map (fun s => s n) w) /\ Forall2 rel w v.

Section Each.
  Context {A B : Type} (relA : (nat -> A) -> A -> Prop) (relB : (nat -> B) -> B -> Prop).

  Lemma each_map (f : nat -> A -> B) (g : A -> B) u v : each relA u v ->
    (forall s x, In x v -> relA s x -> relB (fun n => f n (s n)) (g x)) -> each relB (fun n => map (f n) (u n)) (map g v).
  Proof.
    intros (w & E & F) H. exists (map (fun s n => f n (s n)) w). split.
    - intros n. rewrite E, !map_map. reflexivity.
    - clear E. induction F as [|s x w v R F IH]; cbn; constructor; [apply H; [now left|assumption]|]. apply IH. intros; apply H; [now right|assumption].
  Qed.

  Lemma each_fixed (f : nat -> A -> B) (g : A -> B) l : (forall x, In x l -> relB (fun n => f n x) (g x)) ->
    each relB (fun n => map (f n) l) (map g l).
  Proof.
    intros H. exists (map (fun x n => f n x) l). split; [intros n; now rewrite map_map|].
    induction l as [|x l IH]; cbn; constructor; [apply H; now left|]. apply IH. intros; apply H. now right.
  Qed.

  Lemma each_app u v u' v' : each relA u v -> each relA u' v' -> each relA (fun n => u n ++ u' n)%list (v ++ v')%list.
  Proof.
    intros (w & E & F) (w' & E' & F'). exists (w ++ w')%list. split; [intros n; now rewrite map_app, E, E'|now apply Forall2_app].
  Qed.

  Lemma each_const v : (forall x, relA (fun _ => x) x) -> each relA (fun _ => v) v.
  Proof.
    intros H. exists (map (fun (x : A) (_ : nat) => x) v). split; [intros n; now rewrite map_map, map_id|].
    induction v as [|x v IH]; cbn; constructor; [apply H|assumption].
  Qed.
End Each.

Lemma cv_ext u u' a : (forall n, u n = u' n) -> Un_cv u a -> Un_cv u' a.
Proof. intros E H e He. destruct (H e He) as [N HN]. exists N. intros n Hn. rewrite <- E. now apply HN. Qed.

Lemma cv_const a : Un_cv (fun _ => a) a.
Proof. intros e He. exists 0%nat. intros n _. unfold R_dist. replace (a - a) with 0 by ring. now rewrite Rabs_R0. Qed.

Lemma cv_exp u a : Un_cv u a -> Un_cv (fun n => exp (u n)) (exp a).
Proof. intros H. apply continuity_seq; [|assumption]. apply derivable_continuous_pt, derivable_pt_exp. Qed.

Lemma cv_div u v a b : Un_cv u a -> Un_cv v b -> b <> 0 -> Un_cv (fun n => u n / v n) (a / b).
Proof.
  intros U V N. apply CV_mult; [assumption|]. apply (continuity_seq Rinv); [|assumption].
  apply (continuity_pt_inv (fun x => x)); [|assumption]. apply derivable_continuous_pt, derivable_pt_id.
Qed.

Lemma cv_exp_minus M : cv_infty M -> Un_cv (fun n => exp (- M n)) 0.
Proof.
  intros H e He. destruct (H (- ln e)) as [N HN]. exists N. intros n Hn. unfold R_dist. rewrite Rminus_0_r, Rabs_pos_eq by (apply Rlt_le, exp_pos).
  rewrite <- (exp_ln e He). apply exp_increasing. specialize (HN n Hn). lra.
Qed.

Notation near := (each Un_cv).

Lemma near_nth u v c : near u v -> Un_cv (fun n => nth c (u n) 0) (nth c v 0).
Proof.
  intros (w & E & F). apply (cv_ext (fun n => nth c (map (fun s => s n) w) 0)); [intros n; now rewrite E|]. clear E u. revert c.
  induction F as [|s x w v R F IH]; intros [|c]; cbn; [apply cv_const|apply cv_const|assumption|apply IH].
Qed.

Lemma near_inner u v u' v' : near u v -> near u' v' -> Un_cv (fun n => inner (u n) (u' n)) (inner v v').
Proof.
  intros (w & E & F) (w' & E' & F').
  apply (cv_ext (fun n => inner (map (fun s => s n) w) (map (fun s => s n) w'))); [intros n; now rewrite E, E'|]. clear E E' u u'.
  revert w' v' F'. unfold inner. induction F as [|s x w v R F IH]; intros w' v' F'; [cbn; apply cv_const|].
  destruct F' as [|s' x' w' v' R' F']; [cbn; apply cv_const|]. cbn [map combine fold_right]. apply CV_plus; [now apply CV_mult|now apply IH].
Qed.

Lemma weighted_tends {A} (rel : (nat -> A) -> A -> Prop) (W F : nat -> A -> R) (W' F' : A -> R) u v : each rel u v ->
  (forall s t, rel s t -> Un_cv (fun n => W n (s n)) (W' t) /\ Un_cv (fun n => F n (s n)) (F' t)) ->
  Un_cv (fun n => weighted (W n) (F n) (u n)) (weighted W' F' v).
Proof.
  intros (w & E & G) H. apply (cv_ext (fun n => weighted (W n) (F n) (map (fun s => s n) w))); [intros n; now rewrite E|]. clear E.
  unfold weighted. induction G as [|s t w v R G IH]; cbn; [apply cv_const|]. destruct (H s t R). apply CV_plus; [now apply CV_mult|exact IH].
Qed.

(* ---- attention ---- *)

Section Limit.
  Context {X : Type}.
  Variable tends : (nat -> X) -> X -> Prop.   (* when a sequence of states tends to a state *)
  Hypothesis tends_const : forall x, tends (fun _ => x) x.
  Variables (rotate : Z -> list R -> list R) (next : Z -> list X -> list X).
  Hypothesis rotate_continuous : forall p u v, near u v -> near (fun n => rotate p (u n)) (rotate p v).
  Hypothesis next_continuous : forall p u v, each tends u v -> each tends (fun n => next p (u n)) (next p v).

  Definition continuous_layer (l : decoder_layer X) : Prop :=
    (forall u a, Un_cv u a -> Un_cv (fun n => soft_cap l (u n)) (soft_cap l a))
    /\ (forall s x h, tends s x -> near (fun n => query l (s n) h) (query l x h))
    /\ (forall s x h, tends s x -> near (fun n => key l (s n) h) (key l x h))
    /\ (forall s x h, tends s x -> near (fun n => content l (s n) h) (content l x h))
    /\ (forall s x u v, tends s x -> each near u v -> tends (fun n => after_attention l (s n) (u n)) (after_attention l x v)).

  Variable M : nat -> R.
  Hypothesis M_grows : cv_infty M.

  Definition entry_tends (s : nat -> entry) (t : entry) : Prop :=
    (forall n, at_position (s n) = at_position t) /\ near (fun n => key_at (s n)) (key_at t) /\ near (fun n => value_at (s n)) (value_at t).

  Lemma attend_tends l mask p q q' u v : continuous_layer l -> near q q' -> each entry_tends u v ->
    (exists t, In t v /\ sees mask p t = true) ->
    near (fun n => attend_less rotate (M n) l mask p (q n) (u n)) (attend rotate l mask p q' v).
  Proof.
    intros (Cap & _) Q U (t0 & It & Seen). unfold attend_less, attend. apply each_fixed. intros c _. unfold hidden, average.
    set (W := fun n t => if (at_position t <=? p)%Z then masked_weight (score_of rotate l p (q n)) (M n) (fun t => mask (at_position t)) t else 0).
    assert (forall s t, entry_tends s t -> Un_cv (fun n => W n (s n)) (hidden_weight (score_of rotate l p q') (sees mask p) t)) as Weights.
    { intros s t (P & K & _). unfold W, hidden_weight, weight, masked_weight, sees.
      apply (cv_ext (fun n => if (at_position t <=? p)%Z then exp (score_of rotate l p (q n) (s n) + (if mask (at_position t) then 0 else - M n)) else 0));
        [intros n; now rewrite !P|].
      assert (Un_cv (fun n => score_of rotate l p (q n) (s n)) (score_of rotate l p q' t)) as S.
      { unfold score_of. apply Cap. apply CV_mult; [apply cv_const|]. apply near_inner; [now apply rotate_continuous|assumption]. }
      destruct (at_position t <=? p)%Z; [|rewrite andb_false_r; apply cv_const]. rewrite andb_true_r. destruct (mask (at_position t)).
      - apply cv_exp. rewrite <- (Rplus_0_r (score_of rotate l p q' t)). apply CV_plus; [assumption|apply cv_const].
      - apply (cv_ext (fun n => exp (score_of rotate l p (q n) (s n)) * exp (- M n))); [intros n; now rewrite exp_plus|].
        rewrite <- (Rmult_0_r (exp (score_of rotate l p q' t))). apply CV_mult; [now apply cv_exp|now apply cv_exp_minus]. }
    apply cv_div.
    - apply (weighted_tends entry_tends W (fun _ t => nth c (value_at t) 0)); [assumption|]. intros s t E. split; [now apply Weights|].
      destruct E as (_ & _ & V). now apply (near_nth (fun n => value_at (s n))).
    - apply (weighted_tends entry_tends W (fun _ _ => 1)); [assumption|]. intros s t E. split; [now apply Weights|apply cv_const].
    - rewrite hidden_sum. apply Rgt_not_eq. apply weighted_positive; [apply weight_positive|]. intros E.
      assert (In t0 (filter (sees mask p) v)) as I by (now apply filter_In). now rewrite E in I.
  Qed.

  (* ---- layers ---- *)

  Definition pair_tends (s : nat -> Z * X) (px : Z * X) : Prop := (forall n, fst (s n) = fst px) /\ tends (fun n => snd (s n)) (snd px).

  Lemma numbered_tends seen u v : each tends u v -> each pair_tends (fun n => numbered seen (u n)) (numbered seen v).
  Proof.
    intros (w & E & F). assert (each pair_tends (fun n => numbered seen (map (fun s => s n) w)) (numbered seen v)) as (w' & E' & F').
    { clear E u. revert seen. induction F as [|s x w v R F IH]; intros seen; [exists []; split; [reflexivity|constructor]|].
      destruct (IH (seen + 1)%Z) as (w' & E' & F'). exists ((fun n => (seen, s n)) :: w'). split; [intros n; cbn; now rewrite E'|].
      constructor; [now split|assumption]. }
    exists w'. split; [intros n; now rewrite E|assumption].
  Qed.

  (* A layer with the sequence of its stores, and what they tend to. *)
  Definition hold_tends (s : decoder_layer X * (nat -> nat -> list entry)) (here : @holding X) : Prop :=
    fst s = fst here /\ continuous_layer (fst here) /\ forall kv, each entry_tends (fun n => snd s n kv) (snd here kv).
  Definition at_n (n : nat) (s : decoder_layer X * (nat -> nat -> list entry)) : @holding X := (fst s, snd s n).

  Lemma stored_tends s here u v kv : hold_tends s here -> each pair_tends u v ->
    each entry_tends (fun n => stored_with rotate (at_n n s) (u n) kv) (stored_with rotate here v kv).
  Proof.
    intros (E & (_ & _ & K & C & _) & S) U. unfold stored_with, at_n. cbn [fst snd]. rewrite E. apply each_app; [apply S|].
    apply each_map with (relA := pair_tends); [assumption|]. intros t [p x] _ [P T]. cbn [fst snd] in *.
    replace (fun n => let '(p0, x0) := t n in {| at_position := p0; key_at := rotate p0 (key (fst here) x0 kv); value_at := content (fst here) x0 kv |})
      with (fun n => {| at_position := p; key_at := rotate p (key (fst here) (snd (t n)) kv); value_at := content (fst here) (snd (t n)) kv |}).
    - split; [reflexivity|]. cbn [key_at value_at]. split; [apply rotate_continuous; now apply K|now apply C].
    - apply functional_extensionality. intros n. specialize (P n). destruct (t n) as [p' x']. cbn in *. now subst.
  Qed.

  Lemma through_tends mask seen s here u v : (forall kv p, (seen <= p)%Z -> mask kv p = true) -> hold_tends s here -> each tends u v ->
    each tends (fun n => through_layer rotate (attend_less rotate (M n)) mask (at_n n s) (numbered seen (u n)))
               (through_layer rotate (attend rotate) mask here (numbered seen v)).
  Proof.
    intros Late Hs U. pose proof (numbered_tends seen u v U) as N. unfold through_layer. cbn [at_n fst].
    pose proof Hs as (E & (Cap & Q & K & C & A) & S). rewrite E.
    apply each_map with (relA := pair_tends); [assumption|]. intros t [p x] Ip [P T]. cbn [fst snd] in *.
    match goal with |- tends ?f _ => replace f with (fun n => after_attention (fst here) (snd (t n))
      (map (fun h => attend_less rotate (M n) (fst here) (mask (kv_head (fst here) h)) p (query (fst here) (snd (t n)) h)
        (stored_with rotate (at_n n s) (numbered seen (u n)) (kv_head (fst here) h))) (seq 0 (query_heads (fst here))))) end.
    - apply A; [assumption|]. apply each_fixed. intros h _. apply attend_tends; [now repeat split|now apply Q|now apply stored_tends|].
      exists {| at_position := p; key_at := rotate p (key (fst here) x (kv_head (fst here) h)); value_at := content (fst here) x (kv_head (fst here) h) |}.
      split.
      + unfold stored_with. apply in_or_app. right. apply in_map_iff. exists (p, x). now split.
      + unfold sees. cbn [at_position]. rewrite Z.leb_refl, andb_true_r. apply Late.
        pose proof (numbered_late v seen) as F. rewrite Forall_forall in F. exact (F _ Ip).
    - apply functional_extensionality. intros n. specialize (P n). destruct (t n) as [p' x']. cbn in *. now subst.
  Qed.

  Lemma forward_cons att mask i (here : @holding X) rest seen xs :
    forward rotate att mask i (here :: rest) seen xs
    = (fst (forward rotate att mask (S i) rest seen (through_layer rotate att (mask i) here (numbered seen xs))),
       (fst here, stored_with rotate here (numbered seen xs))
       :: snd (forward rotate att mask (S i) rest seen (through_layer rotate att (mask i) here (numbered seen xs)))).
  Proof. cbn [forward]. now destruct (forward rotate att mask (S i) rest seen _). Qed.

  Lemma forward_tends mask seen : (forall i kv p, (seen <= p)%Z -> mask i kv p = true) ->
    forall w layers, Forall2 hold_tends w layers -> forall i u v, each tends u v ->
    each tends (fun n => fst (forward rotate (attend_less rotate (M n)) mask i (map (at_n n) w) seen (u n)))
               (fst (forward rotate (attend rotate) mask i layers seen v))
    /\ exists w', (forall n, snd (forward rotate (attend_less rotate (M n)) mask i (map (at_n n) w) seen (u n)) = map (at_n n) w')
                  /\ Forall2 hold_tends w' (snd (forward rotate (attend rotate) mask i layers seen v)).
  Proof.
    intros Late w layers F. induction F as [|s here w layers Hs F IH]; intros i u v U.
    - split; [exact U|]. exists []. split; [reflexivity|constructor].
    - pose proof (through_tends (mask i) seen s here u v (Late i) Hs U) as T.
      destruct (IH (S i) _ _ T) as [(y & Y & G) (w' & E & F')]. rewrite forward_cons. cbn [fst snd]. split.
      + exists y. split; [|assumption]. intros n. cbn [map]. rewrite forward_cons. apply Y.
      + exists ((fst s, fun n => stored_with rotate (at_n n s) (numbered seen (u n))) :: w'). split.
        * intros n. cbn [map]. rewrite forward_cons. cbn [snd]. now rewrite E.
        * constructor; [|assumption]. destruct Hs as (E0 & C & S). split; [assumption|]. split; [assumption|]. cbn [fst snd].
          intros kv. apply stored_tends; [exact (conj E0 (conj C S))|now apply numbered_tends].
  Qed.

  Lemma masking_cons att keep rest seen xs mask (layers : list (@holding X)) :
    let left : mask_of := fun i kv p => mask i kv p && leaves keep seen i kv p in
    let f := forward rotate att left 0 layers seen xs in
    masking rotate next att (keep :: rest) seen xs mask layers
    = fst f :: masking rotate next att rest (seen + count xs) (next seen (fst f)) left (snd f).
  Proof. cbn [masking]. now destruct (forward rotate att _ 0 layers seen xs). Qed.

  Lemma each_count (u : nat -> list X) v n : each tends u v -> count (u n) = count v.
  Proof. intros (w & E & F). rewrite E, count_map. clear E. induction F as [|s x w v' T F IH]; cbn [count]; [reflexivity|]. now rewrite IH. Qed.

  (* Any run: with -M at what was evicted, its states tend to those of the run that evicts. *)
  Theorem CC_COMPACT_decoding_limit evictions seen xs (layers : list (@holding X)) :
    Forall (fun here => continuous_layer (fst here)) layers ->
    each (each tends) (fun n => masking rotate next (attend_less rotate (M n)) evictions seen xs everything layers)
                      (evicting rotate next evictions seen xs layers).
  Proof.
    intros Cont. rewrite CC_COMPACT_decoding_equals_masking.
    enough (forall evictions seen mask w layers, (forall i kv p, (seen <= p)%Z -> mask i kv p = true) -> Forall2 hold_tends w layers ->
      forall u v, each tends u v ->
      each (each tends) (fun n => masking rotate next (attend_less rotate (M n)) evictions seen (u n) mask (map (at_n n) w))
                        (masking rotate next (attend rotate) evictions seen v mask layers)) as Run.
    { assert (exists w, (forall n, layers = map (at_n n) w) /\ Forall2 hold_tends w layers) as (w & E & F).
      { exists (map (fun here : @holding X => (fst here, fun _ => snd here)) layers). split.
        - intros n. rewrite map_map. symmetry. rewrite <- (map_id layers) at 2. apply map_ext. now intros [].
        - induction Cont as [|here layers C Cont IH]; cbn; constructor; [|assumption]. split; [reflexivity|]. split; [assumption|].
          intros kv. cbn [fst snd]. apply each_const. intros t. split; [reflexivity|]. split; apply each_const, cv_const. }
      destruct (Run evictions seen everything w layers (fun _ _ _ _ => eq_refl) F (fun _ => xs) xs (each_const _ xs tends_const)) as (y & Y & G).
      exists y. split; [|assumption]. intros n. rewrite <- Y. now rewrite <- E. }
    clear - rotate_continuous next_continuous M_grows. induction evictions as [|keep rest IH]; intros seen mask w layers Late F u v U.
    { exists []. split; [reflexivity|constructor]. }
    set (left := fun i kv p => mask i kv p && leaves keep seen i kv p).
    assert (forall i kv p, (seen <= p)%Z -> left i kv p = true) as Late'.
    { intros i kv p Hp. unfold left, leaves. rewrite Late by assumption. apply Z.leb_le in Hp. rewrite Hp. apply orb_true_r. }
    destruct (forward_tends left seen Late' w layers F 0%nat u v U) as [Y (w' & E & F')].
    rewrite masking_cons. fold left.
    destruct (IH (seen + count v)%Z left w' _ ltac:(intros i kv p Hp; apply Late'; pose proof (count_nonneg v); lia) F' _ _ (next_continuous seen _ _ Y))
      as (z & Z0 & G).
    exists ((fun n => fst (forward rotate (attend_less rotate (M n)) left 0 (map (at_n n) w) seen (u n))) :: z). split.
    - intros n. rewrite masking_cons. fold left. cbn [map]. f_equal. rewrite (each_count u v n U), E. apply Z0.
    - constructor; assumption.
  Qed.
End Limit.
