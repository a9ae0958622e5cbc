(* Theorems about Trunks.v. A name begins with its item: CC_SPLIT_sum is about CC-SPLIT. *)
From Coq Require Import Lqa.
From Kvspec Require Export Ranks Trunks.

(* ---- chunks ---- *)

Lemma chunk_count n C : 0 < C -> 0 <= n -> (n + C - 1) / C * C < n + C /\ n <= (n + C - 1) / C * C.
Proof. intros HC Hn. pose proof (Z.div_mod (n + C - 1) C). pose proof (Z.mod_pos_bound (n + C - 1) C). nia. Qed.

(* Every token lies in the one chunk i = position / C. *)
Theorem CC_COATTENTION_chunks_cover n C t :
  0 < C -> 0 <= t < n -> In (t / C * C, Z.min n ((t / C + 1) * C)) (chunks n C)
                         /\ t / C * C <= t < Z.min n ((t / C + 1) * C).
Proof.
  intros HC Ht. pose proof (Z.div_mod t C). pose proof (Z.mod_pos_bound t C). split; [|lia].
  unfold chunks. apply in_map_iff. exists (t / C). split; [reflexivity|]. apply in_range.
  pose proof (chunk_count n C HC). pose proof (Z.div_pos t C). split; [lia|].
  apply Z.div_lt_upper_bound; lia.
Qed.

Theorem CC_COATTENTION_chunks_bound n C a b :
  0 < C -> 0 <= n -> In (a, b) (chunks n C) -> 0 <= a < b /\ b <= n /\ b - a <= C.
Proof.
  intros HC Hn Hin. apply in_map_iff in Hin as (i & E & Hi). injection E as <- <-. apply in_range in Hi.
  pose proof (chunk_count n C HC Hn).
  assert (i * C <= ((n + C - 1) / C - 1) * C) by (apply Z.mul_le_mono_nonneg_r; lia). nia.
Qed.

(* Chunks compose: whole chunks of a prefix, then those of the rest, shifted. *)
Theorem CC_COATTENTION_chunks_compose k n C :
  0 < C -> 0 <= k -> 0 <= n ->
  chunks (k * C + n) C = chunks (k * C) C ++ map (fun '(a, b) => (k * C + a, k * C + b)) (chunks n C).
Proof.
  intros HC Hk Hn. unfold chunks.
  replace ((k * C + n + C - 1) / C) with (k + (n + C - 1) / C) by (rewrite <- Z.div_add_l; [f_equal|]; lia).
  replace ((k * C + C - 1) / C) with k.
  2: { replace (k * C + C - 1) with (k * C + (C - 1)) by lia. rewrite Z.div_add_l, (Z.div_small (C - 1)); lia. }
  assert (0 <= (n + C - 1) / C) as Hq by (apply Z.div_pos; lia). set (q := (n + C - 1) / C) in *.
  unfold range. rewrite !map_map.
  replace (Z.to_nat (k + q - 0)) with (Z.to_nat (k - 0) + Z.to_nat (q - 0))%nat by lia.
  rewrite seq_app, map_app. f_equal.
  - apply map_ext_in. intros i Hi. apply in_seq in Hi. f_equal. nia.
  - rewrite Nat.add_0_l, <- (Nat.add_0_r (Z.to_nat (k - 0))) at 1.
    replace (seq (Z.to_nat (k - 0) + 0) (Z.to_nat (q - 0))) with
      (map (fun i => Z.to_nat (k - 0) + i)%nat (seq 0 (Z.to_nat (q - 0)))).
    + rewrite map_map. apply map_ext. intros i. f_equal; nia.
    + clear. generalize 0%nat as s. induction (Z.to_nat (q - 0)) as [|m IH]; intros s; cbn; [reflexivity|].
      rewrite IH. f_equal. f_equal. lia.
Qed.

(* ---- sentences ---- *)

Lemma sentences_from open ends :
  0 <= open -> sum (sentences open ends) = open + count ends /\ Forall (fun s => 1 <= s) (sentences open ends).
Proof.
  revert open; induction ends as [|[] ends IH]; intros open Ho; cbn [sentences count].
  - destruct (Z.ltb_spec 0 open); cbn [sum]; (split; [lia|]); repeat constructor; lia.
  - destruct (IH 0) as [S F]; [lia|]. cbn [sum]. split; [lia|]. constructor; [lia|assumption].
  - destruct (IH (open + 1)) as [S F]; [lia|]. split; [lia|assumption].
Qed.

Lemma sentences_cover ends : sum (sentences 0 ends) = count ends.
Proof. apply sentences_from; lia. Qed.

Lemma sentences_no_empty_one ends : Forall (fun s => 1 <= s) (sentences 0 ends).
Proof. apply sentences_from; lia. Qed.

(* A sentence ends behind each flag and behind the last token, and nowhere else. *)
Theorem CC_SENTENCES_offsets ends : offsets 0 (sentences 0 ends)
  = 0 :: map (fun '(p, e) => p + 1) (filter (fun '(p, e) => e || (p + 1 =? count ends)) (numbered 0 ends)).
Proof.
  enough (forall n open p, 0 <= open -> p + count ends = n -> (ends = [] -> open = 0) ->
    offsets (p - open) (sentences open ends)
    = (p - open) :: map (fun '(p, e) => p + 1) (filter (fun '(p, e) => e || (p + 1 =? n)) (numbered p ends))) as E
    by (apply (E (count ends) 0 0); lia).
  intros n. induction ends as [|e ends IH]; intros open p Ho Hn He; cbn [sentences count numbered filter] in *.
  - rewrite He by reflexivity. now replace (p - 0) with p by lia.
  - pose proof (count_nonneg ends) as C. destruct e; cbn [orb map offsets].
    + f_equal. specialize (IH 0 (p + 1)). replace (p - open + (open + 1)) with (p + 1) by lia.
      replace (p + 1 - 0) with (p + 1) in IH by lia. apply IH; lia.
    + destruct ends as [|e ends].
      * cbn [sentences]. destruct (Z.ltb_spec 0 (open + 1)); [|lia]. cbn in *. destruct (Z.eqb_spec (p + 1) n); [|lia].
        cbn. do 2 f_equal. lia.
      * specialize (IH (open + 1) (p + 1)). replace (p + 1 - (open + 1)) with (p - open) in IH by lia.
        rewrite IH by (lia || easy). cbn [count] in *. pose proof (count_nonneg ends).
        destruct (Z.eqb_spec (p + 1) n); [lia|reflexivity].
Qed.

(* ---- splits ---- *)

Section Split.
  Variables T_max size : Z.
  Hypotheses (HT : 1 <= T_max) (Hs : 1 <= size).

  Let k := (size + T_max - 1) / T_max.

  Lemma number_of_pieces : 1 <= k /\ size <= k * T_max /\ (k - 1) * T_max < size /\ k <= size.
  Proof.
    unfold k. pose proof (chunk_count size T_max).
    assert (1 <= (size + T_max - 1) / T_max) by (apply Z.div_le_lower_bound; lia). nia.
  Qed.

  Theorem CC_SPLIT_sum : sum (split T_max size) = size.
  Proof.
    pose proof number_of_pieces. unfold split. fold k. rewrite sum_app, !sum_repeat.
    pose proof (Z.mod_pos_bound size k). pose proof (Z.div_mod size k). rewrite !Z2Nat.id; nia.
  Qed.

  Theorem CC_SPLIT_number : count (split T_max size) = k.
  Proof.
    pose proof number_of_pieces. unfold split. fold k. rewrite count_length, app_length, !repeat_length.
    pose proof (Z.mod_pos_bound size k). lia.
  Qed.

  Theorem CC_SPLIT_even : Forall (fun piece => piece = size / k \/ piece = size / k + 1) (split T_max size).
  Proof.
    apply Forall_forall. intros piece Hp. unfold split in Hp. fold k in Hp.
    apply in_app_or in Hp as [Hp|Hp]; apply repeat_spec in Hp; auto.
  Qed.

  Theorem CC_SPLIT_bound : Forall (fun piece => 1 <= piece <= T_max) (split T_max size).
  Proof.
    pose proof number_of_pieces. apply Forall_forall. intros piece Hp. unfold split in Hp. fold k in Hp.
    pose proof (Z.mod_pos_bound size k). pose proof (Z.div_mod size k).
    apply in_app_or in Hp as [Hp|Hp]; pose proof (repeat_spec _ _ _ Hp) as E; subst piece.
    - assert (0 < size mod k) by (destruct (Z.to_nat (size mod k)) eqn:E; [destruct Hp|lia]). nia.
    - nia.
  Qed.
End Split.

(* The larger pieces come first. *)
Theorem CC_SPLIT_larger_first T_max size : StronglySorted (fun a b => b <= a) (split T_max size).
Proof.
  assert (forall x k, StronglySorted (fun a b => b <= a) (repeat x k)) as Same.
  { intros x k. induction k as [|k IH]; cbn; constructor; [assumption|].
    apply Forall_forall. intros y Hy. apply repeat_spec in Hy. lia. }
  unfold split. apply StronglySorted_app; [apply Same..|]. intros x y Hx Hy.
  apply repeat_spec in Hx, Hy. lia.
Qed.

(* A trunk of at most T_max tokens is one piece. *)
Theorem CC_SPLIT_one_piece T_max size : 1 <= size <= T_max -> split T_max size = [size].
Proof.
  intros H. unfold split. replace ((size + T_max - 1) / T_max) with 1.
  - now rewrite Z.mod_1_r, Z.div_1_r, Z.sub_0_r.
  - apply Z.div_unique with (size - 1); lia.
Qed.

(* ---- trunks ---- *)

Section Merge.
  Context {R : Type} `{Number R}.
  Variables (tau : R) (T_max : Z) (E : Z -> Z -> list R).
  Hypothesis HT : 1 <= T_max.

  Lemma merge_sentences_partition next : forall start stop,
    start < stop -> Forall (fun s => 1 <= s) next ->
    sum (merge_sentences tau T_max E start stop next) = stop - start + sum next
    /\ Forall (fun s => 1 <= s) (merge_sentences tau T_max E start stop next).
  Proof.
    induction next as [|size rest IH]; intros start stop Hs F; cbn [merge_sentences sum].
    - split; [lia|]. repeat constructor. lia.
    - inversion F; subst. destruct merges.
      + destruct (IH start (stop + size)) as [S G]; [lia|assumption|]. split; [lia|assumption].
      + destruct (IH stop (stop + size)) as [S G]; [lia|assumption|]. cbn [sum]. split; [lia|].
        constructor; [lia|assumption].
  Qed.

  Lemma trunks_partition start ends :
    sum (trunks tau T_max E start ends) = count ends
    /\ Forall (fun s => 1 <= s <= T_max) (trunks tau T_max E start ends).
  Proof.
    unfold trunks. pose proof (sentences_cover ends) as S. pose proof (sentences_no_empty_one ends) as F.
    destruct (sentences 0 ends) as [|first rest]; cbn [sum] in S; [split; [assumption|constructor]|].
    inversion F; subst. destruct (merge_sentences_partition rest start (start + first)) as [M G]; [lia|assumption|].
    split.
    - rewrite (sum_flat_map _ (fun s => s)), map_id; [lia|].
      eapply Forall_impl; [|exact G]. intros; now apply CC_SPLIT_sum.
    - apply Forall_forall. intros piece Hp. apply in_flat_map in Hp as (s & Hs & Hp).
      rewrite Forall_forall in G. specialize (G s Hs).
      pose proof (CC_SPLIT_bound T_max s HT G) as B. rewrite Forall_forall in B. now apply B.
  Qed.

  Theorem CC_TRUNKS_cover start ends : sum (trunks tau T_max E start ends) = count ends.
  Proof. apply trunks_partition. Qed.

  Theorem CC_TRUNKS_bound start ends : Forall (fun s => 1 <= s <= T_max) (trunks tau T_max E start ends).
  Proof. apply trunks_partition. Qed.

  (* Between ceil(n / T_max) and n trunks. *)
  Theorem CC_TRUNKS_number start ends :
    let m := count (trunks tau T_max E start ends) in m <= count ends <= m * T_max.
  Proof.
    cbn zeta. rewrite <- (CC_TRUNKS_cover start ends). generalize (CC_TRUNKS_bound start ends).
    induction 1; cbn [count sum]; lia.
  Qed.

End Merge.

(* T_max = 1: trunks are single tokens, whatever the edges, the threshold and the ends. *)
Theorem CC_TRUNKS_token_level {R} `{Number R} tau E start ends :
  trunks tau 1 E start ends = repeat 1 (length ends).
Proof.
  pose proof (CC_TRUNKS_cover tau 1 E ltac:(lia) start ends) as S. rewrite count_length in S.
  pose proof (CC_TRUNKS_bound tau 1 E ltac:(lia) start ends) as F. revert S F.
  generalize (length ends) as n. induction (trunks tau 1 E start ends) as [|s l IH]; intros n S F.
  - destruct n; [reflexivity|cbn in S; lia].
  - inversion F as [|? ? Hs Fl]; subst. cbn [sum] in S. assert (s = 1) by lia. subst s.
    assert (0 <= sum l) by (apply sum_nonneg; eapply Forall_impl; [|exact Fl]; cbn beta; lia).
    destruct n as [|n]; [lia|]. cbn [repeat]. f_equal. apply IH; [lia|assumption].
Qed.

(* No edge, or a sum that does not exceed tau k: no merge. Over the rationals. *)
Lemma rational_sum weights : forall x, (fold_left Qplus weights x == x + fold_right Qplus 0 weights)%Q.
Proof.
  induction weights as [|w weights IH]; intros x; cbn; [ring|]. rewrite IH. ring.
Qed.

Lemma sum_at_most (tau : Q) weights :
  Forall (fun w => w <= tau)%Q weights -> (fold_right Qplus 0 weights <= tau * inject_Z (count weights))%Q.
Proof.
  induction 1 as [|w weights Hw F IH]; cbn [fold_right count].
  - rewrite Qmult_0_r. apply Qle_refl.
  - rewrite inject_Z_plus, Qmult_plus_distr_r, Qmult_1_r. now apply Qplus_le_compat.
Qed.

Theorem CC_MERGE_needs_a_weight_above_tau (tau : Q) T_max weights size next :
  Forall (fun w => w <= tau)%Q weights -> merges tau T_max weights size next = false.
Proof.
  intros F. unfold merges. apply andb_false_intro2. cbn [ltb rational]. apply negb_false_iff, Qle_bool_iff.
  unfold total. cbn [plus minus times of_Z zero rational]. rewrite rational_sum, Qplus_0_l.
  apply sum_at_most in F. lra.
Qed.

(* The rule itself: both fit T_max, there is an edge, and the mean weight exceeds tau. *)
Theorem CC_MERGE_rule (tau : Q) T_max weights size next : merges tau T_max weights size next = true <->
  size + next <= T_max /\ weights <> [] /\ (tau < fold_right Qplus 0 weights / inject_Z (count weights))%Q.
Proof.
  unfold merges. rewrite andb_true_iff, Z.leb_le, rational_less. unfold total. cbn [plus minus times of_Z zero rational].
  rewrite rational_sum, Qplus_0_l.
  enough ((0 < fold_right Qplus 0 weights - tau * inject_Z (count weights))%Q <->
          weights <> [] /\ (tau < fold_right Qplus 0 weights / inject_Z (count weights))%Q) as -> by tauto.
  destruct weights as [|w l]; [split; [cbn; intros L; exfalso; change (inject_Z 0) with 0%Q in L; lra|easy]|].
  set (sum := fold_right Qplus 0%Q (w :: l)). assert (0 < inject_Z (count (w :: l)))%Q as P.
  { change 0%Q with (inject_Z 0). rewrite <- Zlt_Qlt. cbn [count]. pose proof (count_nonneg l). lia. }
  set (k := inject_Z (count (w :: l))) in *. clearbody sum k. split; [intros L; split; [easy|]|intros [_ L]].
  - apply Qlt_shift_div_l; lra.
  - assert (sum / k * k == sum)%Q as E by (field; lra). assert (tau * k < sum / k * k)%Q by (now apply Qmult_lt_compat_r). lra.
Qed.

(* Without edges every sentence is a trunk of its own, but for the splits. *)
Theorem CC_TRUNKS_without_edges (tau : Q) T_max start ends :
  trunks tau T_max (fun _ _ => []) start ends = flat_map (split T_max) (sentences 0 ends).
Proof.
  unfold trunks. destruct (sentences 0 ends) as [|first rest]; [reflexivity|].
  replace (merge_sentences tau T_max (fun _ _ => []) start (start + first) rest) with (first :: rest); [reflexivity|].
  replace first with (start + first - start) at 1 by lia.
  generalize (start + first) as stop. revert start.
  induction rest as [|size rest IH]; intros start stop; cbn [merge_sentences]; [reflexivity|].
  replace (interface_edges _ _ _) with (@nil Q).
  - rewrite CC_MERGE_needs_a_weight_above_tau by constructor. f_equal.
    rewrite <- IH. f_equal. lia.
  - unfold interface_edges. symmetry. clear. induction (last5 start stop) as [|a l IH]; cbn; [reflexivity|].
    rewrite IH, app_nil_r. induction (first5 stop (stop + size)); cbn; auto.
Qed.

(* CC-INTERFACE: at most five on each side, of the trunk and of the sentence. *)
Theorem CC_INTERFACE_last start stop x :
  start < stop -> In x (last5 start stop) <-> start <= x < stop /\ stop - 5 <= x.
Proof. intros. unfold last5. rewrite in_range. lia. Qed.

Theorem CC_INTERFACE_first start stop x :
  start < stop -> In x (first5 start stop) <-> start <= x < stop /\ x < start + 5.
Proof. intros. unfold first5. rewrite in_range. lia. Qed.

Theorem CC_INTERFACE_size start stop :
  start < stop -> count (last5 start stop) = Z.min 5 (stop - start)
                  /\ count (first5 start stop) = Z.min 5 (stop - start).
Proof. intros. unfold last5, first5. rewrite !count_range. lia. Qed.
