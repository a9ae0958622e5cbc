(* Theorems about Dissolution.v. A name begins with its item: CC_ALLOCATE_balance is about CC-ALLOCATE. *)
From Coq Require Import Lqa.
From Kvspec Require Export ListFacts Dissolution.

(* ---- protection ---- *)

(* Protected: one of the trunk's tokens lies in the sink or in the recent window. *)
Theorem CC_PROTECTED_meets n N_sink W_recent a b :
  0 <= a < b -> b <= n ->
  protected n N_sink W_recent a b = true <-> exists x, a <= x < b /\ (x < N_sink \/ n - W_recent <= x).
Proof.
  intros Ha Hb. unfold protected. rewrite orb_true_iff, !Z.ltb_lt. split.
  - intros [L|L]; [exists a|exists (b - 1)]; lia.
  - intros (x & Hx & [L|L]); lia.
Qed.

Theorem CC_PROTECTED_none n a b : 0 <= a < b -> b <= n -> protected n 0 0 a b = false.
Proof. intros. unfold protected. apply orb_false_iff. rewrite !Z.ltb_ge. lia. Qed.

Theorem CC_PROTECTED_all n N_sink W_recent a b :
  0 <= a < b -> b <= n -> n <= W_recent -> protected n N_sink W_recent a b = true.
Proof. intros. unfold protected. apply orb_true_iff. rewrite !Z.ltb_lt. lia. Qed.

(* The protected tokens of trunks that lie side by side from `a` to n. *)
Fixpoint protected_tokens (n N_sink W_recent a : Z) (sizes : list Z) : Z :=
  match sizes with
  | [] => 0
  | s :: rest =>
      (if protected n N_sink W_recent a (a + s) then s else 0) + protected_tokens n N_sink W_recent (a + s) rest
  end.

(* Whole trunks of up to T tokens: at most N_sink + W_recent + 2 (T - 1) protected tokens, 194 at the defaults. *)
Theorem CC_PROTECTED_bound n N_sink W_recent T sizes :
  0 <= N_sink -> 0 <= W_recent -> 1 <= T -> Forall (fun s => 1 <= s <= T) sizes -> n = sum sizes ->
  protected_tokens n N_sink W_recent 0 sizes <= N_sink + W_recent + 2 * (T - 1).
Proof.
  intros HN HW HT F Hn.
  enough (forall a, a + sum sizes = n -> protected_tokens n N_sink W_recent a sizes
    <= Z.max 0 (Z.max (N_sink - a) (1 - T) + T - 1) + Z.min (W_recent + T - 1) (sum sizes)) as E
    by (specialize (E 0 ltac:(lia)); lia).
  clear Hn. induction F as [|s rest Hs F IH]; intros a Ha; cbn [protected_tokens sum] in *; [lia|].
  specialize (IH (a + s) ltac:(lia)).
  assert (0 <= sum rest) by (apply sum_nonneg; eapply Forall_impl; [|exact F]; cbn beta; lia).
  unfold protected. destruct (Z.ltb_spec a N_sink), (Z.ltb_spec (n - W_recent) (a + s)); cbn [orb]; lia.
Qed.

(* ---- the cut ---- *)

Section Cut.
  Variables B_prot T_alive B : Z.
  Hypotheses (HP : 0 <= B_prot) (HA : 0 <= T_alive).

  Lemma cut_bounds : 0 <= cut B_prot T_alive B <= T_alive.
  Proof. unfold cut. lia. Qed.

  (* The least number of unprotected tokens to remove so that at most B tokens stay; all of them where none is enough. *)
  Theorem CC_CUT_is_the_least c : cut B_prot T_alive B = c <->
    0 <= c <= T_alive /\ (B_prot + T_alive - c <= B \/ c = T_alive)
    /\ forall c', 0 <= c' <= T_alive -> B_prot + T_alive - c' <= B -> c <= c'.
  Proof.
    unfold cut. split; [intros <-; repeat split; intros; lia|]. intros (Hc & E & L).
    destruct (Z_le_gt_dec (Z.max 0 (B_prot + T_alive - B)) T_alive) as [F|F]; [specialize (L _ (conj (Z.le_max_l _ _) F) ltac:(lia))|]; lia.
  Qed.
End Cut.

(* ---- allocation ---- *)

Notation slack N_min := (Z.max 0 (N_min - 1)).
Notation positive sizes := (Forall (fun s => 1 <= s) sizes).

Section Allocate.
  Variable N_min : Z.

  Theorem CC_ALLOCATE_stop sizes c : c <= 0 -> allocate N_min sizes c = sizes.
  Proof.
    intros Hc. induction sizes as [|s rest IH]; cbn; [reflexivity|].
    unfold allocate_step. destruct (Z.leb_spec c 0); [|lia]. now rewrite IH.
  Qed.

  Theorem CC_ALLOCATE_balance sizes : positive sizes -> forall c, 0 <= c <= sum sizes ->
    c <= sum sizes - sum (allocate N_min sizes c) <= c + slack N_min.
  Proof.
    induction 1 as [|s rest Hs F IH]; intros c Hc; cbn [allocate sum] in *; [lia|]. unfold allocate_step.
    destruct (Z.leb_spec c 0); [rewrite CC_ALLOCATE_stop by assumption; cbn [sum]; lia|].
    destruct (Z.leb_spec s c); cbn [sum]; [specialize (IH (c - s)); lia|].
    destruct (Z.leb_spec N_min (s - c)); cbn [sum]; rewrite CC_ALLOCATE_stop by lia; lia.
  Qed.

  Theorem CC_ALLOCATE_within sizes c : positive sizes -> Forall2 (fun s k => 0 <= k <= s) sizes (allocate N_min sizes c).
  Proof.
    intros F; revert c; induction F as [|s rest Hs F IH]; intros c; cbn [allocate]; [constructor|]. unfold allocate_step.
    destruct (Z.leb_spec c 0); [constructor; [lia|apply IH]|].
    destruct (Z.leb_spec s c); [constructor; [lia|apply IH]|].
    destruct (Z.leb_spec N_min (s - c)); (constructor; [lia|apply IH]).
  Qed.

  Lemma allocate_length sizes c : length (allocate N_min sizes c) = length sizes.
  Proof.
    revert c; induction sizes as [|s rest IH]; intros c; cbn; [reflexivity|].
    destruct (allocate_step N_min s c). cbn. now rewrite IH.
  Qed.

  (* Some go wholly, one may stay in part with at least N_min tokens, all that follow are whole. *)
  Theorem CC_ALLOCATE_shape sizes : positive sizes -> forall c,
    exists gone whole, (sizes = gone ++ whole /\ allocate N_min sizes c = map (fun _ => 0) gone ++ whole)
      \/ exists s k, sizes = gone ++ s :: whole /\ allocate N_min sizes c = map (fun _ => 0) gone ++ k :: whole
                     /\ Z.max 1 N_min <= k < s.
  Proof.
    induction 1 as [|s rest Hs F IH]; intros c; [exists [], []; now left|].
    cbn [allocate]. unfold allocate_step. destruct (Z.leb_spec c 0).
    { rewrite CC_ALLOCATE_stop by assumption. exists [], (s :: rest). now left. }
    assert (forall left, exists gone whole,
      (s :: rest = gone ++ whole /\ 0 :: allocate N_min rest left = map (fun _ => 0) gone ++ whole)
      \/ exists t k, s :: rest = gone ++ t :: whole /\ 0 :: allocate N_min rest left = map (fun _ => 0) gone ++ k :: whole
                     /\ Z.max 1 N_min <= k < t) as gone_too.
    { intros left. destruct (IH left) as (gone & whole & [(-> & E)|(t & k & -> & E & K)]);
        exists (s :: gone), whole; cbn; rewrite E; [now left|right; now exists t, k]. }
    destruct (Z.leb_spec s c); [apply gone_too|]. destruct (Z.leb_spec N_min (s - c)); [|apply gone_too].
    exists [], rest. right. exists s, (s - c). rewrite CC_ALLOCATE_stop by lia. repeat split; lia.
  Qed.

  (* A smaller cut never takes more of a trunk. *)
  Theorem CC_ALLOCATE_monotone sizes : positive sizes -> forall c c', c <= c' \/ c <= 0 ->
    Forall2 (fun k k' => k' <= k) (allocate N_min sizes c) (allocate N_min sizes c').
  Proof.
    induction 1 as [|s rest Hs F IH]; intros c c' Hc; cbn [allocate]; [constructor|]. unfold allocate_step.
    destruct (Z.leb_spec c 0), (Z.leb_spec c' 0); try lia;
      repeat match goal with |- context [?a <=? ?b] => destruct (Z.leb_spec a b) end;
      try lia; (constructor; [lia|apply IH; lia]).
  Qed.

  (* With N_min of at least the sizes a trunk stays wholly or goes wholly. *)
  Theorem CC_ALLOCATE_binary sizes : Forall (fun s => 1 <= s <= N_min) sizes -> forall c,
    Forall2 (fun s k => k = 0 \/ k = s) sizes (allocate N_min sizes c).
  Proof.
    induction 1 as [|s rest Hs F IH]; intros c; cbn [allocate]; [constructor|]. unfold allocate_step.
    destruct (Z.leb_spec c 0), (Z.leb_spec s c), (Z.leb_spec N_min (s - c)); (constructor; [lia|apply IH]).
  Qed.

  (* The closed form of fast implementations: `before` is the exclusive prefix sum of the sizes. *)
  Fixpoint closed_form (before c_0 : Z) (sizes : list Z) : list Z :=
    match sizes with
    | [] => []
    | s :: rest =>
        (if c_0 <=? before then s
         else if Z.max N_min 1 <=? s - (c_0 - before) then s - (c_0 - before) else 0)
        :: closed_form (before + s) c_0 rest
    end.

  Lemma closed_form_from sizes : positive sizes -> forall before c_0 c,
    c = c_0 - before \/ (c <= 0 /\ c_0 <= before) -> closed_form before c_0 sizes = allocate N_min sizes c.
  Proof.
    induction 1 as [|s rest Hs F IH]; intros before c_0 c Hc; cbn [closed_form allocate]; [reflexivity|].
    unfold allocate_step. destruct (Z.leb_spec c_0 before), (Z.leb_spec c 0); try lia; [f_equal; apply IH; lia|].
    assert (c = c_0 - before) as -> by lia.
    destruct (Z.leb_spec s (c_0 - before)), (Z.leb_spec (Z.max N_min 1) (s - (c_0 - before))); try lia;
      [f_equal; apply IH; lia|..];
      (destruct (Z.leb_spec N_min (s - (c_0 - before))); try lia; f_equal; apply IH; lia).
  Qed.

  Theorem CC_ALLOCATE_closed_form sizes c_0 : positive sizes -> closed_form 0 c_0 sizes = allocate N_min sizes c_0.
  Proof. intros F. apply closed_form_from; [assumption|lia]. Qed.
End Allocate.

Theorem CC_ALLOCATE_N_min_0_is_1 sizes : positive sizes -> forall c, allocate 0 sizes c = allocate 1 sizes c.
Proof.
  induction 1 as [|s rest Hs F IH]; intros c; cbn [allocate]; [reflexivity|]. unfold allocate_step.
  destruct (Z.leb_spec c 0), (Z.leb_spec s c); try (f_equal; apply IH).
  destruct (Z.leb_spec 0 (s - c)), (Z.leb_spec 1 (s - c)); try lia. f_equal. apply IH.
Qed.

(* Trunks of one token: the cut is met exactly. *)
Theorem CC_ALLOCATE_single_tokens N_min sizes c :
  Forall (fun s => s = 1) sizes -> 0 <= c <= sum sizes -> sum (allocate N_min sizes c) = sum sizes - c.
Proof.
  intros F; revert c; induction F as [|s rest -> F IH]; intros c Hc; cbn [allocate sum] in *; [lia|]. unfold allocate_step.
  destruct (Z.leb_spec c 0); [rewrite CC_ALLOCATE_stop by lia; cbn [sum]; lia|].
  destruct (Z.leb_spec 1 c); [|lia]. cbn [sum]. rewrite IH; lia.
Qed.

(* ---- the count of a partial trunk ---- *)

Lemma round_whole (z : Z) (x : Q) : (x == inject_Z z)%Q -> round_half_even x = z.
Proof.
  destruct x as [a b]. unfold Qeq. cbn. intros E. unfold round_half_even. cbn [Qnum Qden].
  assert (a = z * Zpos b) as -> by lia. rewrite Z.div_mul, Z.mod_mul by lia.
  destruct (Z.ltb_spec (2 * 0) (Zpos b)); [reflexivity|lia].
Qed.

Lemma keep_count_of_ratio s k N_min : N_min <= k -> 0 < k <= s -> keep_count (inject_Z k / inject_Z s) s N_min = k.
Proof.
  intros HN Hk. unfold keep_count. rewrite (round_whole k); [lia|].
  rewrite <- Qmult_div_r with (x := inject_Z k) (y := inject_Z s) at 2; [ring|].
  intros E. unfold Qeq in E. cbn in E. lia.
Qed.

Lemma round_half_even_nearest (x : Q) (z : Z) : round_half_even x = z <->
  (- (1 # 2) < x - inject_Z z < 1 # 2)%Q
  \/ ((x - inject_Z z == 1 # 2)%Q \/ (x - inject_Z z == - (1 # 2))%Q) /\ Z.even z = true.
Proof.
  destruct x as [a b]. unfold round_half_even. cbn [Qnum Qden].
  assert (((a # b) - inject_Z z == 1 # 2)%Q <-> 2 * a - 2 * (z * Zpos b) = Zpos b) as -> by (unfold Qeq, Qminus, Qplus, Qopp, inject_Z; cbn [Qnum Qden]; lia).
  assert (((a # b) - inject_Z z == - (1 # 2))%Q <-> 2 * a - 2 * (z * Zpos b) = - Zpos b) as -> by (unfold Qeq, Qminus, Qplus, Qopp, inject_Z; cbn [Qnum Qden]; lia).
  assert ((- (1 # 2) < (a # b) - inject_Z z < 1 # 2)%Q <-> - Zpos b < 2 * a - 2 * (z * Zpos b) < Zpos b) as ->
    by (unfold Qlt, Qminus, Qplus, Qopp, inject_Z; cbn [Qnum Qden]; lia).
  pose proof (Z.div_mod a (Zpos b) ltac:(lia)) as A. pose proof (Z.mod_pos_bound a (Zpos b) ltac:(lia)).
  set (q := a / Zpos b) in *. set (r := a mod Zpos b) in *. clearbody q r.
  assert (z * Zpos b <= (q - 1) * Zpos b \/ z = q \/ z = q + 1 \/ (q + 2) * Zpos b <= z * Zpos b) as Where.
  { assert (z <= q - 1 \/ z = q \/ z = q + 1 \/ q + 2 <= z) as [W|[W|[W|W]]] by lia; auto.
    - left. apply Z.mul_le_mono_nonneg_r; lia.
    - right; right; right. apply Z.mul_le_mono_nonneg_r; lia. }
  rewrite !Z.mul_sub_distr_r, !Z.mul_add_distr_r in Where. rewrite (Z.mul_comm (Zpos b) q) in A.
  pose proof (Z.even_succ q) as Even. unfold Z.succ in Even. rewrite <- Z.negb_even in Even.
  all: destruct Where as [W|[->|[->|W]]]; rewrite ?Z.mul_add_distr_r.
  all: destruct (Z.ltb_spec (2 * r) (Zpos b)); [|destruct (Z.ltb_spec (Zpos b) (2 * r)); [|destruct (Z.even q) eqn:E]].
  all: rewrite ?Even; cbn [negb].
  all: split; intros C; try lia; try (intuition (try lia; try discriminate)).
Qed.

(* Between N_min and the size the count is the whole number nearest to r times the size, of two the even one. *)
Theorem CC_KEEP_COUNT_rounds r s N_min k : N_min < k < s -> keep_count r s N_min = k <->
  (- (1 # 2) < r * inject_Z s - inject_Z k < 1 # 2)%Q
  \/ ((r * inject_Z s - inject_Z k == 1 # 2)%Q \/ (r * inject_Z s - inject_Z k == - (1 # 2))%Q) /\ Z.even k = true.
Proof. intros Hk. rewrite <- round_half_even_nearest. unfold keep_count. lia. Qed.

(* Below N_min it is N_min, above the size the size. *)
Theorem CC_KEEP_COUNT_ends r s N_min : N_min <= s ->
  ((r * inject_Z s <= inject_Z N_min)%Q -> keep_count r s N_min = N_min)
  /\ ((inject_Z s <= r * inject_Z s)%Q -> keep_count r s N_min = s).
Proof.
  intros HN. unfold keep_count. set (x := (r * inject_Z s)%Q). destruct (round_half_even_nearest x (round_half_even x)) as [N _].
  specialize (N eq_refl). set (k := round_half_even x) in *. clearbody k x. split; intros L.
  - enough (k <= N_min) by lia. destruct (Z_le_gt_dec k N_min) as [|G]; [assumption|exfalso].
    assert (inject_Z N_min + 1 <= inject_Z k)%Q by (change 1%Q with (inject_Z 1); rewrite <- inject_Z_plus, <- Zle_Qle; lia). lra.
  - enough (s <= k) by lia. destruct (Z_le_gt_dec s k) as [|G]; [assumption|exfalso].
    assert (inject_Z k + 1 <= inject_Z s)%Q by (change 1%Q with (inject_Z 1); rewrite <- inject_Z_plus, <- Zle_Qle; lia). lra.
Qed.
