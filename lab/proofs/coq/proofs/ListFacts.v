(* Facts about Lists.v: sums, numbered lists, and that sort gives a sorted permutation. *)
From Coq Require Export Lia Permutation Sorted.
From Kvspec Require Export Lists.

Lemma count_length {A} (l : list A) : count l = Z.of_nat (length l).
Proof. induction l as [|x l IH]; cbn [count length]; lia. Qed.

Lemma count_nonneg {A} (l : list A) : 0 <= count l.
Proof. rewrite count_length; lia. Qed.

Lemma count_app {A} (l r : list A) : count (l ++ r) = count l + count r.
Proof. rewrite !count_length, app_length; lia. Qed.

Lemma count_map {A B} (f : A -> B) l : count (map f l) = count l.
Proof. now rewrite !count_length, map_length. Qed.

Lemma count_permutation {A} (l r : list A) : Permutation l r -> count l = count r.
Proof. intros P; rewrite !count_length, (Permutation_length P); reflexivity. Qed.

Lemma sum_app l r : sum (l ++ r) = sum l + sum r.
Proof. induction l as [|x l IH]; cbn [sum app]; lia. Qed.

Lemma sum_repeat x k : sum (repeat x k) = Z.of_nat k * x.
Proof. induction k as [|k IH]; cbn [repeat sum]; lia. Qed.

Lemma sum_permutation l r : Permutation l r -> sum l = sum r.
Proof. induction 1; cbn [sum]; lia. Qed.

Lemma sum_nonneg l : Forall (fun x => 0 <= x) l -> 0 <= sum l.
Proof. induction 1; cbn [sum]; lia. Qed.

Lemma sum_flat_map {A} (f : A -> list Z) (g : A -> Z) l :
  Forall (fun x => sum (f x) = g x) l -> sum (flat_map f l) = sum (map g l).
Proof. induction 1; cbn; [|rewrite sum_app]; lia. Qed.

Lemma count_flat_map {A B} (f : A -> list B) (g : A -> Z) l :
  Forall (fun x => count (f x) = g x) l -> count (flat_map f l) = sum (map g l).
Proof. induction 1; cbn; [|rewrite count_app]; lia. Qed.

Lemma sum_partition {A} (p : A -> bool) (f : A -> Z) l :
  sum (map f (filter p l)) + sum (map f (filter (fun x => negb (p x)) l)) = sum (map f l).
Proof. induction l as [|x l IH]; cbn; [|destruct (p x)]; cbn; lia. Qed.

Lemma partition_permutation {A} (p : A -> bool) l :
  Permutation (filter (fun x => negb (p x)) l ++ filter p l) l.
Proof.
  induction l as [|x l IH]; cbn; [constructor|]. destruct (p x); cbn.
  - rewrite <- Permutation_middle. now constructor.
  - now constructor.
Qed.

Lemma take_drop {A} k (l : list A) : take k l ++ drop k l = l.
Proof.
  revert k; induction l as [|x l IH]; intros k; cbn; [reflexivity|].
  destruct (k <=? 0); cbn; [|rewrite IH]; reflexivity.
Qed.

Lemma count_take {A} k (l : list A) : count (take k l) = Z.max 0 (Z.min k (count l)).
Proof.
  revert k; induction l as [|x l IH]; intros k; cbn [take count]; [lia|].
  destruct (Z.leb_spec k 0); cbn [count]; [pose proof (count_nonneg l); lia|]. rewrite IH. pose proof (count_nonneg l). lia.
Qed.

Lemma take_all {A} k (l : list A) : count l <= k -> take k l = l.
Proof.
  revert k; induction l as [|x l IH]; intros k Hk; cbn [take count] in *; [reflexivity|].
  pose proof (count_nonneg l). destruct (Z.leb_spec k 0); [lia|]. rewrite IH by lia. reflexivity.
Qed.

Lemma take_none {A} k (l : list A) : k <= 0 -> take k l = [].
Proof. destruct l; cbn; [|destruct (Z.leb_spec k 0)]; intros; [reflexivity..|lia]. Qed.

Lemma take_incl {A} k (l : list A) : incl (take k l) l.
Proof. intros x Hx. rewrite <- (take_drop k l). apply in_or_app; now left. Qed.

Lemma take_mono {A} k k' (l : list A) : k <= k' -> incl (take k l) (take k' l).
Proof.
  revert k k'; induction l as [|x l IH]; intros k k' Hk; cbn; [easy|].
  destruct (Z.leb_spec k 0); [easy|]. destruct (Z.leb_spec k' 0); [lia|].
  intros y [<-|Hy]; [now left|right]. now apply (IH (k - 1) (k' - 1)); [lia|].
Qed.

Lemma numbered_snd {A} s (l : list A) : map snd (numbered s l) = l.
Proof. revert s; induction l as [|x l IH]; intros s; cbn; [|rewrite IH]; reflexivity. Qed.

Lemma numbered_fst {A} s (l : list A) : map fst (numbered s l) = range s (s + count l).
Proof.
  unfold range. replace (s + count l - s) with (count l) by lia. rewrite count_length, Nat2Z.id.
  revert s; induction l as [|x l IH]; intros s; [reflexivity|]. cbn [numbered map fst length seq].
  f_equal; [lia|]. rewrite IH, <- seq_shift, map_map. apply map_ext; intros; lia.
Qed.

Lemma in_range x a b : In x (range a b) <-> a <= x < b.
Proof.
  unfold range. rewrite in_map_iff. split.
  - intros (i & <- & Hi). apply in_seq in Hi. lia.
  - intros H. exists (Z.to_nat (x - a)). split; [lia|]. apply in_seq. lia.
Qed.

Lemma count_range a b : count (range a b) = Z.max 0 (b - a).
Proof. unfold range. rewrite count_map, count_length, seq_length. lia. Qed.

Lemma range_ascends a b : StronglySorted Z.lt (range a b).
Proof.
  unfold range. generalize (Z.to_nat (b - a)) as k, 0%nat as i. induction k as [|k IH]; intros i; cbn; [constructor|].
  constructor; [apply IH|]. apply Forall_forall. intros x Hx. apply in_map_iff in Hx as (j & <- & Hj).
  apply in_seq in Hj. lia.
Qed.

Lemma ascending_NoDup l : StronglySorted Z.lt l -> NoDup l.
Proof.
  induction 1 as [|x l S IH F]; constructor; [|assumption]. intros Hx.
  rewrite Forall_forall in F. specialize (F x Hx). lia.
Qed.

Lemma NoDup_left {A} (l r : list A) : NoDup (l ++ r) -> NoDup l.
Proof.
  induction l as [|x l IH]; cbn; intros N; constructor; inversion N; subst; [|now apply IH].
  intros Hx. apply H1, in_or_app. now left.
Qed.

(* Two lists with the same elements that ascend strictly by a key are the same list. *)
Lemma ascending_unique {A} (key : A -> Z) l r :
  StronglySorted (fun x y => key x < key y) l -> StronglySorted (fun x y => key x < key y) r -> Permutation l r -> l = r.
Proof.
  intros Sl; revert r; induction Sl as [|x l Sl IH Fl]; intros r Sr P.
  - symmetry. now apply Permutation_nil.
  - destruct Sr as [|y r Sr Fr]; [now apply Permutation_sym, Permutation_nil in P|].
    rewrite Forall_forall in Fl, Fr.
    assert (x = y) as <-.
    { assert (In x (y :: r)) as [->|Hx] by (apply (Permutation_in _ P); now left); [reflexivity|].
      assert (In y (x :: l)) as [->|Hy] by (apply (Permutation_in _ (Permutation_sym P)); now left); [reflexivity|].
      specialize (Fr x Hx); specialize (Fl y Hy); lia. }
    f_equal. apply IH; [assumption|]. now apply Permutation_cons_inv in P.
Qed.

(* Without repeated keys, ascending is strictly ascending. *)
Lemma ascending_strictly {A} (key : A -> Z) l :
  StronglySorted (fun x y => key x <= key y) l -> NoDup (map key l) -> StronglySorted (fun x y => key x < key y) l.
Proof.
  induction 1 as [|x l S IH F]; intros N; constructor; inversion N; subst; [now apply IH|].
  rewrite Forall_forall in *. intros y Hy. specialize (F y Hy).
  assert (key x <> key y) by (intros E; apply H1; rewrite E; now apply in_map). lia.
Qed.

Lemma StronglySorted_app {A} (R : A -> A -> Prop) l r :
  StronglySorted R l -> StronglySorted R r -> (forall x y, In x l -> In y r -> R x y) -> StronglySorted R (l ++ r).
Proof.
  induction 1 as [|x l S IH F]; intros Sr C; cbn; [assumption|]. constructor.
  - apply IH; [assumption|]. intros; apply C; cbn; auto.
  - apply Forall_app; split; [assumption|]. apply Forall_forall. intros y Hy. apply C; cbn; auto.
Qed.

Lemma StronglySorted_map {A B} (R : A -> A -> Prop) (S : B -> B -> Prop) (f : A -> B) l :
  (forall x y, R x y -> S (f x) (f y)) -> StronglySorted R l -> StronglySorted S (map f l).
Proof.
  intros RS. induction 1 as [|x l Sl IH F]; cbn; constructor; [assumption|].
  apply Forall_map. eapply Forall_impl; [|exact F]. auto.
Qed.

Section SortFacts.
  Context {A : Type} (before : A -> A -> bool).

  Lemma merge_cons x l y r :
    merge before (x :: l) (y :: r) = if before x y then x :: merge before l (y :: r) else y :: merge before (x :: l) r.
  Proof. reflexivity. Qed.

  Lemma merge_nil_l r : merge before [] r = r.
  Proof. destruct r; reflexivity. Qed.

  Lemma merge_nil_r l : merge before l [] = l.
  Proof. destruct l; reflexivity. Qed.

  Lemma merge_permutation l r : Permutation (merge before l r) (l ++ r).
  Proof.
    revert r; induction l as [|x l IHl]; intros r; [rewrite merge_nil_l; reflexivity|].
    induction r as [|y r IHr]; [rewrite merge_nil_r, app_nil_r; reflexivity|]. rewrite merge_cons.
    destruct (before x y).
    - cbn. now rewrite IHl.
    - rewrite IHr. apply Permutation_middle.
  Qed.

  Definition held (stack : list (option (list A))) : list A :=
    flat_map (fun place => match place with Some l => l | None => [] end) stack.

  Lemma push_permutation stack : forall l, Permutation (held (push before l stack)) (l ++ held stack).
  Proof.
    induction stack as [|[older|] rest IH]; intros l; cbn [push held flat_map].
    - reflexivity.
    - cbn [app]. rewrite IH, merge_permutation, app_assoc. apply Permutation_app_tail, Permutation_app_comm.
    - reflexivity.
  Qed.

  Lemma collapse_permutation stack : Permutation (collapse before stack) (held stack).
  Proof.
    induction stack as [|[l|] rest IH]; cbn [collapse held flat_map]; [reflexivity| |exact IH].
    rewrite merge_permutation, IH. apply Permutation_app_comm.
  Qed.

  Theorem sort_permutation l : Permutation (sort before l) l.
  Proof.
    unfold sort. rewrite collapse_permutation.
    enough (forall stack, Permutation (held (fold_left (fun s x => push before [x] s) l stack)) (l ++ held stack))
      as E by (rewrite E; cbn; now rewrite app_nil_r).
    induction l as [|x l IH]; intros stack; cbn [fold_left]; [reflexivity|].
    rewrite IH, push_permutation. cbn. now rewrite Permutation_middle.
  Qed.

  Lemma in_sort x l : In x (sort before l) <-> In x l.
  Proof. split; apply Permutation_in; [|apply Permutation_sym]; apply sort_permutation. Qed.

  (* What holds of a total, transitive order. *)
  Hypothesis before_total : forall x y, before x y = true \/ before y x = true.
  Hypothesis before_trans : forall x y z, before x y = true -> before y z = true -> before x z = true.

  Notation sorted := (StronglySorted (fun x y => before x y = true)).

  Lemma merge_sorted l r : sorted l -> sorted r -> sorted (merge before l r).
  Proof.
    intros Sl; revert r; induction Sl as [|x l Sl IHl Fl]; intros r Sr; [now rewrite merge_nil_l|].
    induction Sr as [|y r Sr IHr Fr]; [rewrite merge_nil_r; now constructor|].
    rewrite merge_cons. destruct (before x y) eqn:E.
    - constructor; [apply IHl; now constructor|].
      apply (Permutation_Forall (Permutation_sym (merge_permutation l (y :: r)))).
      apply Forall_app; split; [assumption|]. constructor; [assumption|].
      eapply Forall_impl; [|exact Fr]. intros z Hz. now apply (before_trans x y z).
    - assert (before y x = true) as E' by (destruct (before_total x y); congruence).
      constructor; [exact IHr|].
      apply (Permutation_Forall (Permutation_sym (merge_permutation (x :: l) r))). constructor; [assumption|].
      apply Forall_app; split; [|assumption].
      eapply Forall_impl; [|exact Fl]. intros z Hz. now apply (before_trans y x z).
  Qed.

  Definition all_sorted : list (option (list A)) -> Prop :=
    Forall (fun place => match place with Some l => sorted l | None => True end).

  Lemma push_sorted stack : forall l, sorted l -> all_sorted stack -> all_sorted (push before l stack).
  Proof.
    induction stack as [|[older|] rest IH]; intros l Sl F; cbn [push].
    - now constructor.
    - inversion F; subst. constructor; [exact I|]. apply IH; [now apply merge_sorted|assumption].
    - inversion F; subst. now constructor.
  Qed.

  Lemma collapse_sorted stack : all_sorted stack -> sorted (collapse before stack).
  Proof.
    induction 1 as [|[l|] rest Sl F IH]; cbn [collapse]; [constructor| |assumption]. now apply merge_sorted.
  Qed.

  Theorem sort_sorted l : sorted (sort before l).
  Proof.
    apply collapse_sorted. enough (forall stack, all_sorted stack ->
      all_sorted (fold_left (fun s x => push before [x] s) l stack)) as E by (apply E; constructor).
    induction l as [|x l IH]; intros stack F; cbn [fold_left]; [assumption|].
    apply IH, push_sorted; [repeat constructor|assumption].
  Qed.
End SortFacts.

(* In a sorted list, what is taken stands before what is dropped. *)
Lemma take_before {A} (R : A -> A -> Prop) k l :
  StronglySorted R l -> forall x y, In x (take k l) -> In y (drop k l) -> R x y.
Proof.
  intros S; revert k; induction S as [|z l S IH F]; intros k x y Hx Hy; cbn in *; [easy|].
  destruct (k <=? 0); [easy|]. destruct Hx as [->|Hx]; [|now apply (IH (k - 1))].
  rewrite Forall_forall in F. apply F. rewrite <- (take_drop (k - 1) l). apply in_or_app; now right.
Qed.

(* Numbers whose `<` is a strict weak order: no NaN. *)
Class Ordered (R : Type) `{Number R} := {
  ltb_asym : forall x y, ltb x y = true -> ltb y x = false;
  ltb_cotrans : forall x y z, ltb x z = true -> ltb x y = true \/ ltb y z = true
}.

Lemma rational_less (x y : Q) : ltb x y = true <-> (x < y)%Q.
Proof.
  cbn. rewrite negb_true_iff, <- not_true_iff_false, Qle_bool_iff. split; [apply Qnot_le_lt|apply Qlt_not_le].
Qed.

#[global] Instance rational_ordered : Ordered Q.
Proof.
  split; intros x y; [rewrite <- not_true_iff_false|intros z]; rewrite !rational_less.
  - intros L. apply Qle_not_lt. now apply Qlt_le_weak.
  - intros L. destruct (Qlt_le_dec x y) as [A|A]; [now left|right]. now apply Qle_lt_trans with x.
Qed.

(* ties_by_place is a total order wherever `ahead` is a strict weak one. *)
Section Ties.
  Context {A : Type} (ahead : A -> A -> bool) (place : A -> Z).
  Hypothesis asym : forall x y, ahead x y = true -> ahead y x = false.
  Hypothesis cotrans : forall x y z, ahead x z = true -> ahead x y = true \/ ahead y z = true.

  Notation before := (ties_by_place ahead place).

  Lemma ties_total x y : before x y = true \/ before y x = true.
  Proof.
    unfold ties_by_place. destruct (ahead x y), (ahead y x); cbn; auto.
    destruct (Z.leb_spec (place x) (place y)), (Z.leb_spec (place y) (place x)); auto; lia.
  Qed.

  Lemma ties_true x y :
    before x y = true <-> ahead x y = true \/ (ahead y x = false /\ place x <= place y).
  Proof.
    unfold ties_by_place. rewrite orb_true_iff, andb_true_iff, negb_true_iff, Z.leb_le. reflexivity.
  Qed.

  Lemma ties_never_back x y : before x y = true -> ahead y x = false.
  Proof. intros B. apply ties_true in B as [B|[B _]]; auto. Qed.

  Lemma ties_trans x y z : before x y = true -> before y z = true -> before x z = true.
  Proof.
    intros XY YZ. pose proof (ties_never_back _ _ XY) as YX. pose proof (ties_never_back _ _ YZ) as ZY.
    assert (ahead z x = false) as ZX.
    { destruct (ahead z x) eqn:E; [|reflexivity]. destruct (cotrans z y x E); congruence. }
    apply ties_true. destruct (ahead x z) eqn:XZ; [now left|right; split; [exact ZX|]].
    apply ties_true in XY as [XY|[_ P]]; [destruct (cotrans x z y XY); congruence|].
    apply ties_true in YZ as [YZ|[_ Q]]; [destruct (cotrans y x z YZ); congruence|]. lia.
  Qed.

  Lemma sort_ties l : StronglySorted (fun x y => before x y = true) (sort before l).
  Proof. apply sort_sorted; [apply ties_total|apply ties_trans]. Qed.
End Ties.

(* Sorting by a place. *)
Lemma sort_places {A} (place : A -> Z) l :
  StronglySorted (fun x y => place x <= place y) (sort (fun x y => place x <=? place y) l).
Proof.
  assert (StronglySorted (fun x y => (place x <=? place y) = true) (sort (fun x y => place x <=? place y) l)) as S.
  { apply sort_sorted; intros; rewrite !Z.leb_le in *; lia. }
  induction S as [|x r S IH F]; constructor; [assumption|]. eapply Forall_impl; [|exact F]. intros; now apply Z.leb_le.
Qed.
