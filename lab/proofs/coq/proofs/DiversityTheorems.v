(* Theorems about Diversity.v (DV-GREEDY). *)
From Coq Require Import Lqa.
From Kvspec Require Export Ranks Diversity.

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
  Lemma grow_open rounds : forall open, incl (grow rounds open) (map place open).
  Proof.
    induction rounds as [|rounds IH]; intros open p Hp; cbn in Hp; [easy|]. destruct (best open) as [c|] eqn:E; [|easy].
    destruct Hp as [<-|Hp]; [now apply in_map, best_in|]. apply IH in Hp. rewrite without_places in Hp.
    now apply filter_In in Hp.
  Qed.

  Lemma grow_distinct rounds : forall open, NoDup (grow rounds open).
  Proof.
    induction rounds as [|rounds IH]; intros open; cbn; [constructor|]. destruct (best open) as [c|] eqn:E; [|constructor].
    constructor; [|apply IH]. intros Hc. apply grow_open in Hc. rewrite without_places in Hc.
    apply filter_In in Hc as [_ Hc]. now rewrite Z.eqb_refl in Hc.
  Qed.

  (* As many as were asked for, while there are any. *)
  Lemma grow_length rounds : forall open, NoDup (map place open) ->
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

(* ---- the greedy choice ---- *)

(* An inner product takes the channels from the first to the last, and starts from 0: these equations say it wholly. *)
Theorem DV_COSINE_first_to_last {R} `{Number R} (u v : list R) (x y : R) : length u = length v ->
  dot [] [] = zero /\ dot (u ++ [x]) (v ++ [y]) = plus (dot u v) (times x y).
Proof.
  intros L. split; [reflexivity|]. unfold dot, total.
  assert (combine (u ++ [x]) (v ++ [y]) = combine u v ++ [(x, y)]) as ->.
  { revert v L. induction u as [|a u IH]; intros [|b v] L; cbn in *; try discriminate; [reflexivity|]. rewrite IH; [reflexivity|lia]. }
  now rewrite map_app, fold_left_app.
Qed.

Lemma NoDup_app_of {A} (l r : list A) : NoDup l -> NoDup r -> (forall x, In x l -> ~ In x r) -> NoDup (l ++ r).
Proof.
  induction 1 as [|x l Out N IH]; cbn; intros Nr D; [assumption|]. constructor; [|apply IH; [assumption|intros; apply D; now right]].
  intros I. apply in_app_or in I as [I|I]; [contradiction|]. apply (D x); [now left|assumption].
Qed.

Section Greedy.
  Context {R : Type} `{Ordered R}.
  Variables (lambda : R) (similarity : Z -> Z -> R) (scores : list R).

  (* How like what is kept the token at i is, at least 0; and what it is worth then. *)
  Definition likeness_to (kept : list Z) (i : Z) : R :=
    fold_left (fun most j => if ltb most (similarity j i) then similarity j i else most) kept zero.
  Definition worth_beside (kept : list Z) (i : Z) (score : R) : R := minus score (times lambda (likeness_to kept i)).

  (* The token at p, with its score, is worth most of those that are not kept; of equal ones it has the lowest position. *)
  Definition best_beside (kept : list Z) (p : Z) : Prop :=
    exists score, In (p, score) (numbered 0 scores) /\ ~ In p kept
    /\ forall i other, In (i, other) (numbered 0 scores) -> ~ In i kept -> i <> p ->
         ltb (worth_beside kept i other) (worth_beside kept p score) = true
         \/ (ltb (worth_beside kept p score) (worth_beside kept i other) = false /\ p < i).

  (* One after the other, each beside those before it. *)
  Fixpoint greedy (kept picks : list Z) : Prop :=
    match picks with
    | [] => True
    | p :: rest => best_beside kept p /\ greedy (kept ++ [p]) rest
    end.

  Lemma number_unique i a b : In (i, a) (numbered 0 scores) -> In (i, b) (numbered 0 scores) -> a = b.
  Proof.
    assert (NoDup (map fst (numbered 0 scores))) as N by (rewrite numbered_fst; apply ascending_NoDup, range_ascends).
    induction (numbered 0 scores) as [|[j c] l IH]; [easy|]. cbn in N. inversion N as [|? ? Out N']; subst.
    intros [A|A] [B|B]; try congruence; [|injection B as -> ->|now apply IH].
    - injection A as -> ->. exfalso. apply Out. now apply (in_map fst) in B.
    - exfalso. apply Out. now apply (in_map fst) in A.
  Qed.

  (* The candidates that are open once `kept` are kept. *)
  Definition open_beside (kept : list Z) : list (candidate R) :=
    map (fun t => {| place := fst t; worth := snd t; likeness := likeness_to kept (fst t) |})
        (filter (fun t => negb (existsb (Z.eqb (fst t)) kept)) (numbered 0 scores)).

  Lemma without_open kept p : without similarity p (open_beside kept) = open_beside (kept ++ [p]).
  Proof.
    unfold without, open_beside. induction (numbered 0 scores) as [|[i x] l IH]; cbn [filter map]; [reflexivity|].
    rewrite existsb_app. cbn [existsb fst]. rewrite orb_false_r. destruct (existsb (Z.eqb i) kept); cbn [negb orb]; [exact IH|].
    cbn [map filter place fst]. destruct (i =? p); cbn [negb]; [exact IH|]. cbn [map fst]. f_equal; [|exact IH].
    unfold nearer, likeness_to. cbn [place worth likeness fst snd]. now rewrite fold_left_app.
  Qed.

  Lemma not_kept kept i : negb (existsb (Z.eqb i) kept) = true <-> ~ In i kept.
  Proof.
    rewrite negb_true_iff, <- not_true_iff_false, existsb_exists. split; intros N I; apply N.
    - exists i. split; [assumption|apply Z.eqb_refl].
    - destruct I as (j & I & E). apply Z.eqb_eq in E. now subst.
  Qed.

  Lemma in_open kept c : In c (open_beside kept) <->
    In (place c, worth c) (numbered 0 scores) /\ ~ In (place c) kept /\ likeness c = likeness_to kept (place c).
  Proof.
    unfold open_beside. rewrite in_map_iff. split.
    - intros ([i x] & <- & I). apply filter_In in I as [I N]. cbn in *. apply not_kept in N. auto.
    - intros (I & N & L). exists (place c, worth c). split; [destruct c; cbn in *; now subst|]. apply filter_In.
      split; [assumption|]. now apply not_kept.
  Qed.

  Lemma open_places kept : NoDup (map place (open_beside kept)).
  Proof.
    unfold open_beside. rewrite map_map. cbn [place].
    assert (NoDup (map fst (numbered 0 scores))) as N by (rewrite numbered_fst; apply ascending_NoDup, range_ascends).
    induction (numbered 0 scores) as [|t l IH]; cbn in *; [constructor|]. inversion N as [|? ? Out N']; subst.
    destruct (negb _); cbn; [constructor|]; auto. intros I. apply Out. apply in_map_iff in I as (u & <- & Hu).
    apply filter_In in Hu as [Hu _]. now apply in_map.
  Qed.

  Lemma best_first open : forall c d, best lambda open = Some c -> In d open -> chosen_before lambda c d = true.
  Proof.
    assert (forall c d, chosen_before lambda c d = true \/ chosen_before lambda d c = true) as Total by (intros; apply ties_total).
    assert (forall c, chosen_before lambda c c = true) as Refl by (intros c; now destruct (Total c c)).
    induction open as [|e rest IH]; intros c d E Hd; [easy|]. cbn in E. destruct (best lambda rest) as [f|] eqn:F.
    - destruct (chosen_before lambda e f) eqn:B; injection E as <-.
      + destruct Hd as [<-|Hd]; [apply Refl|]. specialize (IH f d eq_refl Hd). revert B IH. apply ties_trans.
        * intros; now apply ltb_asym.
        * intros x y z. rewrite or_comm. now apply ltb_cotrans.
      + destruct Hd as [<-|Hd]; [destruct (Total e f); congruence|auto].
    - injection E as <-. apply best_none in F as ->. destruct Hd as [<-|[]]. apply Refl.
  Qed.

  Lemma best_is_best kept c : best lambda (open_beside kept) = Some c -> best_beside kept (place c).
  Proof.
    intros E. pose proof (best_in _ _ _ E) as I. apply in_open in I as (I & N & L). exists (worth c). repeat split; [assumption..|].
    intros i x Hi Ni Ne.
    assert (In {| place := i; worth := x; likeness := likeness_to kept i |} (open_beside kept)) as D by (now apply in_open).
    pose proof (best_first _ _ _ E D) as B. unfold chosen_before in B. apply ties_true in B as [B|[B P]]; [left|right].
    - unfold worth_beside. rewrite <- L. exact B.
    - split; [unfold worth_beside; rewrite <- L; exact B|cbn in P; lia].
  Qed.

  Lemma grow_greedy rounds : forall kept, greedy kept (grow lambda similarity rounds (open_beside kept)).
  Proof.
    induction rounds as [|rounds IH]; intros kept; cbn [grow]; [exact I|]. destruct (best lambda (open_beside kept)) as [c|] eqn:E; [|exact I].
    cbn [greedy]. split; [now apply best_is_best|]. rewrite without_open. apply IH.
  Qed.

  (* Of two greedy ways of the same length there is one. *)
  Theorem DV_GREEDY_one_way picks : forall kept others, length picks = length others ->
    greedy kept picks -> greedy kept others -> picks = others.
  Proof.
    induction picks as [|p picks IH]; intros kept [|q others] L G G'; try discriminate; [reflexivity|].
    destruct G as [B G], G' as [B' G']. injection L as L.
    assert (p = q) as <-; [|f_equal; eapply IH; eassumption].
    destruct B as (x & Hp & Np & B), B' as (y & Hq & Nq & B'). destruct (Z.eq_dec p q) as [|N]; [assumption|exfalso].
    destruct (B q y Hq Nq ltac:(congruence)) as [C|[C P]], (B' p x Hp Np N) as [D|[D Q]]; try congruence; [|lia].
    pose proof (ltb_asym _ _ C). congruence.
  Qed.

  (* DV-GREEDY: what was retained, and the greedy picks beside it, as many as are missing of k, ascending. *)
  Theorem DV_GREEDY_is_greedy retained k : length retained = length scores ->
    let before := map fst (filter (fun t => snd t) (numbered 0 retained)) in
    exists picks, diverse lambda similarity scores retained k = sort Z.leb (before ++ picks) /\ greedy before picks
      /\ count picks = Z.max 0 (Z.min (k - count before) (count scores - count before)).
  Proof.
    intros L before. unfold diverse.
    assert (map fst (filter (fun t : Z * (R * bool) => snd (snd t)) (numbered 0 (combine scores retained))) = before) as ->.
    { unfold before. clear before. revert retained L. generalize 0 as s. generalize scores as l.
      induction l as [|x l IH]; intros s [|b r] L; cbn in *; try discriminate; [reflexivity|]. injection L as L.
      destruct b; cbn; now rewrite (IH (s + 1) r L). }
    set (fresh := map _ (numbered 0 (combine scores retained))).
    assert (fresh = open_beside []) as ->.
    { unfold fresh, open_beside. clear before fresh. revert retained L. generalize 0 as s. generalize scores as l.
      induction l as [|x l IH]; intros s [|b r] L; cbn in *; try discriminate; [reflexivity|]. injection L as L.
      f_equal. now apply IH. }
    assert (forall l kept, fold_left (fun open i => without similarity i open) l (open_beside kept) = open_beside (kept ++ l)) as E.
    { induction l as [|i l IH]; intros kept; cbn; [now rewrite app_nil_r|]. rewrite without_open, IH, <- app_assoc. reflexivity. }
    rewrite E. cbn [app]. eexists. split; [reflexivity|]. split; [apply grow_greedy|].
    rewrite count_length, grow_length by apply open_places.
    assert (count before + Z.of_nat (length (open_beside before)) = count scores) as C.
    { rewrite <- count_length. unfold open_beside. rewrite count_map.
      assert (NoDup before) as NB.
      { unfold before. assert (NoDup (map fst (numbered 0 retained))) as N by (rewrite numbered_fst; apply ascending_NoDup, range_ascends).
        clear - N. induction (numbered 0 retained) as [|[i b] l IH]; cbn in *; [constructor|]. inversion N as [|? ? Out N']; subst.
        destruct b; cbn; [constructor|]; auto. intros I. apply Out. apply in_map_iff in I as (u & <- & Hu).
        apply filter_In in Hu as [Hu _]. now apply in_map. }
      assert (incl before (range 0 (count scores))) as IB.
      { intros i Hi. unfold before in Hi. apply in_map_iff in Hi as (t & <- & Ht). apply filter_In in Ht as [Ht _].
        apply (in_map fst) in Ht. rewrite numbered_fst in Ht. replace (count scores) with (0 + count retained); [assumption|].
        rewrite !count_length. lia. }
      rewrite <- (count_map fst). 
      assert (map fst (filter (fun t : Z * R => negb (existsb (Z.eqb (fst t)) before)) (numbered 0 scores))
              = filter (fun i => negb (existsb (Z.eqb i) before)) (range 0 (0 + count scores))) as ->.
      { rewrite <- numbered_fst. induction (numbered 0 scores) as [|[i x] l IH]; cbn; [reflexivity|].
        destruct (existsb (Z.eqb i) before); cbn; now rewrite IH. }
      rewrite Z.add_0_l. transitivity (count (range 0 (count scores))); [|rewrite count_range; pose proof (count_nonneg scores); lia].
      rewrite <- count_app. apply count_permutation, NoDup_Permutation.
      - apply NoDup_app_of; [assumption|apply NoDup_filter, ascending_NoDup, range_ascends|].
        intros i Hi Hf. apply filter_In in Hf as [_ Hf]. now apply not_kept in Hf.
      - apply ascending_NoDup, range_ascends.
      - intros i. rewrite in_app_iff, filter_In, not_kept. split; [intros [I|[I _]]; auto|].
        intros I. destruct (in_dec Z.eq_dec i before); auto. }
    lia.
  Qed.
End Greedy.

(* Over the rationals the likeness is the greatest similarity to what is kept, or 0. *)
Theorem DV_GREEDY_likeness similarity kept i :
  (0 <= likeness_to similarity kept i)%Q /\ Forall (fun j => similarity j i <= likeness_to similarity kept i)%Q kept
  /\ (likeness_to similarity kept i = 0%Q \/ exists j, In j kept /\ likeness_to similarity kept i = similarity j i).
Proof.
  unfold likeness_to. cbn [zero rational]. generalize 0%Q as m.
  induction kept as [|j kept IH]; intros m; cbn [fold_left].
  - split; [apply Qle_refl|]. split; [constructor|now left].
  - destruct (IH (if ltb m (similarity j i) then similarity j i else m)) as (A & F & C). destruct (ltb m (similarity j i)) eqn:E.
    + apply rational_less in E. split; [lra|]. split; [now constructor|]. right.
      destruct C as [C|(l & Hl & C)]; [exists j; split; [now left|assumption]|exists l; split; [now right|assumption]].
    + apply not_true_iff_false in E. rewrite rational_less in E. apply Qnot_lt_le in E. split; [assumption|].
      split; [constructor; [lra|assumption]|]. destruct C as [C|(l & Hl & C)]; [now left|right; exists l; split; [now right|assumption]].
Qed.

(* lambda = 0: redundancy counts for nothing. Whoever is picked has the higher score, or the lower position of two equal
   ones, than whoever is neither retained nor picked: the choice is PO-TOP-UNITS'. *)
Theorem DV_GREEDY_lambda_0 similarity scores picks : forall kept p q x y, greedy 0%Q similarity scores kept picks ->
  In (p, x) (numbered 0 scores) -> In (q, y) (numbered 0 scores) ->
  In p picks -> ~ In q (kept ++ picks) -> (y < x)%Q \/ ((y <= x)%Q /\ p < q).
Proof.
  induction picks as [|b picks IH]; intros kept p q x y G Hp Hq Ip Nq; [easy|]. destruct G as [B G].
  destruct Ip as [->|Ip].
  - destruct B as (s & Hs & Ns & B). assert (s = x) as -> by (eapply number_unique; eassumption).
    destruct (B q y Hq) as [C|[C P]].
    + intros I. apply Nq, in_or_app. now left.
    + intros ->. apply Nq, in_or_app. right. now left.
    + left. apply rational_less in C. unfold worth_beside in C. cbn [minus times rational] in C. rewrite !Qmult_0_l in C. lra.
    + right. split; [|assumption]. apply not_true_iff_false in C. rewrite rational_less in C. unfold worth_beside in C.
      cbn [minus times rational] in C. rewrite !Qmult_0_l in C. lra.
  - apply (IH (kept ++ [b]) p q x y G Hp Hq Ip). now rewrite <- app_assoc.
Qed.
