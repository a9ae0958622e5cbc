(* A sorted list as ranks: how many elements come before one. Who comes before whom is said without a sort. *)
From Kvspec Require Export ListFacts.

(* Two sorted permutations of each other are the same list, where no two elements stand before each other. *)
Lemma sorted_unique {A} (before : A -> A -> bool) l r :
  (forall x y, In x l -> In y l -> before x y = true -> before y x = true -> x = y) ->
  StronglySorted (fun x y => before x y = true) l -> StronglySorted (fun x y => before x y = true) r ->
  Permutation l r -> l = r.
Proof.
  intros U Sl; revert r U; induction Sl as [|x l Sl IH Fl]; intros r U Sr P.
  - symmetry. now apply Permutation_nil.
  - destruct Sr as [|y r Sr Fr]; [now apply Permutation_sym, Permutation_nil in P|].
    rewrite Forall_forall in Fl, Fr.
    assert (x = y) as <-.
    { assert (In y (x :: l)) as Hy by (apply (Permutation_in _ (Permutation_sym P)); now left).
      assert (In x (y :: r)) as Hx by (apply (Permutation_in _ P); now left).
      destruct Hx as [->|Hx]; [reflexivity|]. destruct Hy as [->|Hy]; [reflexivity|].
      apply U; [now left|now right|now apply Fl|now apply Fr]. }
    f_equal. apply IH; [intros; apply U; cbn; auto|assumption|]. now apply Permutation_cons_inv in P.
Qed.

Lemma permutation_filter {A} (p : A -> bool) l r : Permutation l r -> Permutation (filter p l) (filter p r).
Proof.
  induction 1; cbn; [constructor|..]; repeat match goal with |- context [p ?x] => destruct (p x) end;
    try constructor; try reflexivity; try assumption. now transitivity (filter p l').
Qed.

Lemma filter_all {A} (p : A -> bool) l : (forall x, In x l -> p x = true) -> filter p l = l.
Proof.
  induction l as [|x l IH]; cbn; intros F; [reflexivity|]. rewrite F by now left. f_equal. apply IH. intros; apply F. now right.
Qed.

Lemma filter_none {A} (p : A -> bool) l : (forall x, In x l -> p x = false) -> filter p l = [].
Proof.
  induction l as [|x l IH]; cbn; intros F; [reflexivity|]. rewrite F by now left. apply IH. intros; apply F. now right.
Qed.

(* Who stands strictly before x: ahead of it, or level with it and at a lower place. *)
Definition earlier {A} (ahead : A -> A -> bool) (place : A -> Z) (x y : A) : bool :=
  ahead y x || (negb (ahead x y) && (place y <? place x)).

Section Ranks.
  Context {A : Type} (ahead : A -> A -> bool) (place : A -> Z).
  Hypothesis asym : forall x y, ahead x y = true -> ahead y x = false.
  Hypothesis cotrans : forall x y z, ahead x z = true -> ahead x y = true \/ ahead y z = true.

  Notation before := (ties_by_place ahead place).

  Lemma earlier_not_back x y : before x y = true -> earlier ahead place x y = false.
  Proof.
    intros B. unfold earlier. rewrite (ties_never_back _ _ asym _ _ B). cbn. apply ties_true in B as [B|[B P]].
    - now rewrite B.
    - apply andb_false_intro2. apply Z.ltb_ge. lia.
  Qed.

  Lemma before_earlier x y : before y x = true -> place x <> place y -> earlier ahead place x y = true.
  Proof.
    intros B N. unfold earlier. apply orb_true_iff. apply ties_true in B as [B|[B P]]; [now left|right].
    rewrite B. cbn. apply Z.ltb_lt. lia.
  Qed.

  (* In the sorted list, those before x are the earlier ones. *)
  Lemma earlier_prefix l x r : NoDup (map place (l ++ x :: r)) -> StronglySorted (fun x y => before x y = true) (l ++ x :: r) ->
    filter (earlier ahead place x) (l ++ x :: r) = l.
  Proof.
    intros N S. assert (before x x = true) as Self by (destruct (ties_total ahead place x x); assumption).
    rewrite filter_app. cbn [filter]. rewrite (earlier_not_back x x Self).
    rewrite (filter_none _ r), app_nil_r.
    - apply filter_all. intros y Hy. apply before_earlier.
      + clear - S Hy. induction l as [|z l IH]; [easy|]. cbn in S. inversion S as [|? ? S' F]; subst.
        destruct Hy as [<-|Hy]; [|now apply IH]. rewrite Forall_forall in F. apply F, in_or_app. right. now left.
      + intros E. rewrite map_app in N. cbn [map] in N. apply NoDup_remove_2 in N. apply N. apply in_or_app. left.
        rewrite E. now apply in_map.
    - intros y Hy. apply earlier_not_back. clear - S Hy. induction l as [|z l IH]; cbn in S; inversion S as [|? ? S' F]; subst; auto.
      rewrite Forall_forall in F. now apply F.
  Qed.

  (* An element of a list and those that come before it once the list is sorted. *)
  Lemma sorted_split all x : NoDup (map place all) -> In x all ->
    exists l r, sort before all = l ++ x :: r /\ Permutation l (filter (earlier ahead place x) all).
  Proof.
    intros N Hx. apply (in_sort before) in Hx. apply in_split in Hx as (l & r & E). exists l, r. split; [assumption|].
    rewrite <- (earlier_prefix l x r).
    - rewrite <- E. apply permutation_filter, sort_permutation.
    - rewrite <- E. eapply Permutation_NoDup; [|exact N]. apply Permutation_map, Permutation_sym, sort_permutation.
    - rewrite <- E. now apply sort_ties.
  Qed.

  (* Among the first k once sorted: fewer than k come before it. *)
  Lemma in_take_sorted all x k : NoDup (map place all) -> In x all ->
    In x (take k (sort before all)) <-> count (filter (earlier ahead place x) all) < k.
  Proof.
    intros N Hx. destruct (sorted_split all x N Hx) as (l & r & E & P). rewrite <- (count_permutation _ _ P), E.
    assert (NoDup (l ++ x :: r)) as D.
    { rewrite <- E. eapply Permutation_NoDup; [apply Permutation_sym, sort_permutation|]. now apply NoDup_map_inv in N. }
    clear - D. revert k. induction l as [|y l IH]; intros k; cbn [app take count].
    - destruct (Z.leb_spec k 0); [split; [easy|lia]|]. split; [lia|now left].
    - cbn in D. inversion D as [|? ? Out D']; subst. destruct (Z.leb_spec k 0).
      + pose proof (count_nonneg l). split; [easy|lia].
      + cbn [In]. rewrite (IH D' (k - 1)). split; [intros [->|]; [|lia]|intros; right; lia].
        exfalso. apply Out, in_or_app. right. now left.
  Qed.
End Ranks.
