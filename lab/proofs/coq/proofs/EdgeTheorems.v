(* Theorems about edges and impacts (Trunks.v): CC-EDGES, CC-INTERFACE-EDGES, CC-TRUNK-IMPACT. *)
From Coq Require Import Lqa Qreduction.
From Kvspec Require Export Ranks TrunkTheorems.

Lemma flat_map_one {A B} (key : A -> Z) (f : A -> list B) a l : NoDup (map key l) -> In a l ->
  (forall x, In x l -> key x <> key a -> f x = []) -> flat_map f l = f a.
Proof.
  induction l as [|x l IH]; cbn; intros N Ha F; [easy|]. inversion N as [|? ? Out N']; subst. destruct Ha as [->|Ha].
  - enough (flat_map f l = []) as -> by apply app_nil_r. assert (forall y, In y l -> f y = []) as G.
    { intros y Hy. apply F; [now right|]. intros E. apply Out. rewrite <- E. now apply in_map. }
    clear - G. induction l as [|y l IH]; cbn; [reflexivity|]. rewrite G by now left. apply IH. intros; apply G. now right.
  - rewrite F; [|now left|]; [apply IH; auto|]. intros E. apply Out. rewrite E. now apply in_map.
Qed.

Section Edges.
  Context {R : Type}.
  Variables (near far : Z -> list (Z * R)) (tokens : list Z).

  (* CC-EDGES as triples in the item's order: intra edges by owner, as (owner, neighbour); then cross edges by owner, as
     (source, owner). *)
  Definition triples : list (Z * Z * R) :=
    flat_map (fun owner => map (fun '(other, w) => (owner, other, w)) (near owner)) tokens
    ++ flat_map (fun owner => map (fun '(source, w) => (source, owner, w)) (far owner)) tokens.

  Definition of_pair (first second : Z) (edge : Z * Z * R) : bool := let '(a, b, _) := edge in (a =? first) && (b =? second).

  Lemma filter_flat_map {A B} (p : B -> bool) (f : A -> list B) l : filter p (flat_map f l) = flat_map (fun x => filter p (f x)) l.
  Proof. induction l as [|x l IH]; cbn; [reflexivity|]. now rewrite filter_app, IH. Qed.

  Theorem CC_EDGES_of_a_pair first second : NoDup tokens -> In first tokens -> In second tokens ->
    stored_edges near far first second = map snd (filter (of_pair first second) triples).
  Proof.
    intros N Hf Hs. unfold triples, stored_edges. rewrite filter_app, map_app, !filter_flat_map.
    rewrite <- (map_id tokens) in N.
    rewrite (flat_map_one (fun x => x) _ first tokens N Hf), (flat_map_one (fun x => x) _ second tokens N Hs).
    - f_equal; [induction (near first) as [|[other w] l IH]|induction (far second) as [|[source w] l IH]]; cbn; try reflexivity.
      + rewrite Z.eqb_refl. cbn. destruct (other =? second); cbn; now rewrite IH.
      + rewrite Z.eqb_refl, andb_true_r. destruct (source =? first); cbn; now rewrite IH.
    - intros x _ Nx. apply filter_none. intros [[a b] w] I. apply in_map_iff in I as ([o v] & E & _). injection E as <- <- <-.
      cbn. replace (x =? second) with false by (symmetry; now apply Z.eqb_neq). apply andb_false_r.
    - intros x _ Nx. apply filter_none. intros [[a b] w] I. apply in_map_iff in I as ([o v] & E & _). injection E as <- <- <-.
      cbn. replace (x =? first) with false by (symmetry; now apply Z.eqb_neq). reflexivity.
  Qed.

  Lemma flat_map_prod {B} (f : Z -> Z -> list B) current sentence :
    flat_map (fun a => flat_map (f a) sentence) current = flat_map (fun '(a, b) => f a b) (list_prod current sentence).
  Proof.
    induction current as [|a current IH]; cbn [flat_map list_prod]; [reflexivity|]. rewrite flat_map_app, <- IH. f_equal.
    clear IH. induction sentence as [|b sentence IHs]; cbn; [reflexivity|]. now rewrite IHs.
  Qed.

  (* The edges from the trunk's side to the sentence's side, by first endpoint and then by second; no edge backwards. *)
  Theorem CC_INTERFACE_EDGES_in_order current sentence : NoDup tokens -> incl current tokens -> incl sentence tokens ->
    interface_edges (stored_edges near far) current sentence
    = map snd (flat_map (fun '(a, b) => filter (of_pair a b) triples) (list_prod current sentence)).
  Proof.
    intros N Ic Is. unfold interface_edges. rewrite flat_map_prod.
    assert (forall a b, In (a, b) (list_prod current sentence) -> In a tokens /\ In b tokens) as I.
    { intros a b Hab. apply in_prod_iff in Hab as [Ha Hb]. auto. }
    induction (list_prod current sentence) as [|[a b] l IH]; cbn [flat_map]; [reflexivity|].
    rewrite map_app, IH by (intros; apply I; now right). f_equal. destruct (I a b (or_introl eq_refl)). now apply CC_EDGES_of_a_pair.
  Qed.
End Edges.

(* ---- impact ---- *)

(* The three largest members, or all of fewer, from the largest down; their sum by their number. *)
Theorem CC_TRUNK_IMPACT_of_the_largest {R} `{Ordered R} members : exists top rest,
  Permutation (top ++ rest) members /\ count top = Z.min 3 (count members)
  /\ StronglySorted (fun x y => ltb x y = false) top /\ (forall x y, In x top -> In y rest -> ltb x y = false)
  /\ trunk_impact members = over (total top) (of_Z (count top)).
Proof.
  set (down := sort (fun x y => negb (ltb x y)) members).
  assert (StronglySorted (fun x y => ltb x y = false) down) as S.
  { assert (StronglySorted (fun x y => negb (ltb x y) = true) down) as S.
    { apply sort_sorted.
      - intros x y. rewrite !negb_true_iff. destruct (ltb x y) eqn:E; [right; now apply ltb_asym|now left].
      - intros x y z. rewrite !negb_true_iff. intros A B. destruct (ltb x z) eqn:E; [|reflexivity].
        destruct (ltb_cotrans x y z E); congruence. }
    induction S as [|x l S IH F]; constructor; [assumption|]. eapply Forall_impl; [|exact F]. intros y. now rewrite negb_true_iff. }
  exists (take 3 down), (drop 3 down). repeat split.
  - rewrite take_drop. apply sort_permutation.
  - rewrite count_take. unfold down. rewrite (count_permutation _ _ (sort_permutation _ _)). pose proof (count_nonneg members). lia.
  - rewrite <- (take_drop 3 down) in S. revert S. generalize (drop 3 down) as r. induction (take 3 down) as [|x l IH]; intros r S; constructor.
    + cbn in S. inversion S; subst. now apply (IH r).
    + cbn in S. inversion S as [|? ? _ F]; subst. now apply Forall_app in F.
  - now apply take_before.
Qed.

Definition no_less (x y : Q) : bool := negb (ltb x y).

Lemma no_less_iff x y : no_less x y = true <-> (y <= x)%Q.
Proof. unfold no_less. rewrite negb_true_iff, <- not_true_iff_false, rational_less. split; [apply Qnot_lt_le|apply Qle_not_lt]. Qed.

Lemma sum_permutation_Q l r : Permutation l r -> (fold_right Qplus 0 l == fold_right Qplus 0 r)%Q.
Proof. induction 1; cbn [fold_right]; lra. Qed.

Lemma sum_reduced l : (fold_right Qplus 0 (map Qred l) == fold_right Qplus 0 l)%Q.
Proof. induction l as [|x l IH]; cbn [map fold_right]; [reflexivity|]. now rewrite IH, Qred_correct. Qed.

(* The larger ones first, reduced: one list for all that have the same elements. *)
Definition falling (top rest : list Q) : list Q := map Qred (sort no_less top) ++ map Qred (sort no_less rest).

Lemma falling_sorted top rest : (forall x y, In x top -> In y rest -> (y <= x)%Q) ->
  StronglySorted (fun x y => no_less x y = true) (falling top rest).
Proof.
  intros D.
  assert (forall l, StronglySorted (fun x y => no_less x y = true) (map Qred (sort no_less l))) as S.
  { intros l. apply StronglySorted_map with (R := fun x y => no_less x y = true).
    - intros x y. now rewrite !no_less_iff, !Qred_correct.
    - apply sort_sorted; intros x y; [|intros z]; rewrite !no_less_iff; [|intros; lra].
      destruct (Qlt_le_dec x y); [right; now apply Qlt_le_weak|now left]. }
  apply StronglySorted_app; [apply S..|]. intros x y Hx Hy. apply in_map_iff in Hx as (a & <- & Ha), Hy as (b & <- & Hb).
  apply no_less_iff. rewrite !Qred_correct. apply D; now apply in_sort in Ha, Hb.
Qed.

(* Any three members that none of the others exceeds give the impact: the largest ones are determined as far as it counts. *)
Theorem CC_TRUNK_IMPACT_of_any_largest (members top rest : list Q) :
  Permutation (top ++ rest) members -> count top = Z.min 3 (count members) ->
  (forall x y, In x top -> In y rest -> (y <= x)%Q) ->
  (trunk_impact members == fold_right Qplus 0 top / inject_Z (count top))%Q.
Proof.
  intros P C D. destruct (CC_TRUNK_IMPACT_of_the_largest members) as (top' & rest' & P' & C' & _ & D' & ->).
  assert (falling top rest = falling top' rest') as E.
  { apply (sorted_unique no_less).
    - intros x y Hx Hy XY YX. apply no_less_iff in XY, YX.
      assert (forall z t r, In z (falling t r) -> Qred z = z) as Reduced.
      { intros z t r Hz. unfold falling in Hz. apply in_app_or in Hz as [Hz|Hz]; apply in_map_iff in Hz as (w & <- & _);
          apply Qred_complete, Qred_correct. }
      rewrite <- (Reduced x _ _ Hx), <- (Reduced y _ _ Hy). apply Qred_complete. lra.
    - now apply falling_sorted.
    - apply falling_sorted. intros x y Hx Hy. apply no_less_iff. unfold no_less. now rewrite (D' x y Hx Hy).
    - unfold falling. rewrite <- !map_app. apply Permutation_map. rewrite !sort_permutation. now rewrite P, P'. }
  unfold falling in E. assert (map Qred (sort no_less top) = map Qred (sort no_less top')) as T.
  { assert (length (map Qred (sort no_less top)) = length (map Qred (sort no_less top'))) as L.
    { rewrite !map_length, (Permutation_length (sort_permutation no_less top)), (Permutation_length (sort_permutation no_less top')).
      rewrite !count_length in C, C'. lia. }
    clear - E L. revert E L. generalize (map Qred (sort no_less top)) as l, (map Qred (sort no_less top')) as l'.
    induction l as [|x l IH]; intros [|x' l'] E L; try discriminate; [reflexivity|]. cbn in E, L. injection E as -> E. f_equal. apply IH; [assumption|lia]. }
  cbn [over of_Z rational]. rewrite C, <- C'. unfold total. cbn [plus zero rational]. change (fold_left Qplus top' 0%Q) with (fold_left Qplus top' 0)%Q.
  assert (fold_left Qplus top' 0 == fold_right Qplus 0 top')%Q as -> by (rewrite rational_sum; ring).
  rewrite <- (sum_permutation_Q _ _ (sort_permutation no_less top)), <- (sum_permutation_Q _ _ (sort_permutation no_less top')).
  rewrite <- (sum_reduced (sort no_less top)), <- (sum_reduced (sort no_less top')), T. reflexivity.
Qed.
