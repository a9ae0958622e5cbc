(* What does not hold. FC1 to FC18 are the false properties of the paper's prose (conformance/suite/test_false_properties.py
   has the same list); those about logarithms, roots and exponentials are in RealCounterexamples.v. *)
From Coq Require Import Lqa.
From Kvspec Require Import TrunkTheorems KeptTheorems BudgetTheorems ScoreTheorems.

Definition plain (start size : Z) (score : Q) : trunk Q :=
  {| start := start; members := repeat 1%Q (Z.to_nat size); score := score; strength := 1%Q; safe := false |}.

(* FC1: "low-scoring trunks lose proportionally more": five of ten trunks go wholly, one in part, four stay intact. *)
Theorem CC_ALLOCATE_FC1_not_graduated :
  allocate 3 (repeat 10 10) (100 - 45) = [0; 0; 0; 0; 0; 5; 10; 10; 10; 10].
Proof. reflexivity. Qed.

(* FC2: "retain at least N_min tokens": a trunk of two stays whole. *)
Theorem CC_ALLOCATE_FC2_fewer_than_N_min : allocate 3 [4; 2] 4 = [0; 2].
Proof. reflexivity. Qed.

(* FC3: "B is about beta n": the floor decides below 440 tokens at beta = 0.3. *)
Theorem CC_BUDGET_FC3_the_floor_decides :
  effective (Fraction (3 # 10)) 100 4 128 = 132 /\ effective (Fraction (3 # 10)) 200 4 128 = 132
  /\ tokens (Fraction (3 # 10)) 200 = 60.
Proof. repeat split. Qed.

(* FC4: "the protected set fits": whole trunks make 194 tokens where B = 132. The bound of CC_PROTECTED_bound is reached. *)
Theorem CC_PROTECTED_FC4_above_the_budget :
  protected_tokens 226 4 128 0 [3; 32; 32; 32; 32; 32; 32; 31] = 194 /\ sum [3; 32; 32; 32; 32; 32; 32; 31] = 226.
Proof. split; reflexivity. Qed.

(* FC5: "splits bound the number of trunks": fifty full stops are fifty trunks. *)
Theorem CC_TRUNKS_FC5_as_many_as_tokens :
  count (trunks (3 # 10)%Q 32 (fun _ _ => []) 0 (repeat true 50)) = 50.
Proof. reflexivity. Qed.

(* FC6: "either path lets a trunk survive": the best D of all, shared, loses to M~ alone. *)
Theorem CC_SCORE_FC6_the_best_D_goes :
  map (fun '(D, M) => best_path 1%Q D M) [(623 # 1000, 0); (0, 7 # 10)]%Q = [623 # 1000; 1 * (7 # 10)]%Q
  /\ kept 3 4 [plain 0 4 (623 # 1000); plain 4 4 (7 # 10)] = [4; 5; 6; 7].
Proof. split; reflexivity. Qed.

(* FC9: staged eviction is direct eviction: 12 to 8 to 4 tokens keeps trunk 0, 12 to 4 keeps trunk 2. The range of M~
   changes in between. log1p enters by the order of its values alone, so the identity stands for it. *)
Definition scored (D M_bar : list Q) : list (trunk Q) :=
  map (fun '(i, x) => plain (4 * i) 4 x) (numbered 0 (scores (1 # 100000000)%Q 1%Q (fun x => x) D M_bar)).

Theorem CC_NORMALISED_IMPACT_FC9_staged_is_not_direct :
  kept 3 4 (scored [82 # 100; 74 # 100; 45 # 100] [53 # 10; 14 # 10; 53 # 10])%Q = [8; 9; 10; 11]   (* trunk 2 *)
  /\ kept 3 8 (scored [82 # 100; 74 # 100; 45 # 100] [53 # 10; 14 # 10; 53 # 10])%Q = [0; 1; 2; 3; 8; 9; 10; 11]
  /\ kept 3 4 (scored [82 # 100; 45 # 100] [53 # 10; 53 # 10])%Q = [0; 1; 2; 3].                     (* trunk 0 *)
Proof. repeat split; vm_compute; reflexivity. Qed.

(* FC11: "tau_merge controls granularity": where every weight exceeds 0.3, no tau_merge up to 0.3 changes a merge. *)
Theorem CC_MERGE_FC11_tau_has_no_effect (tau tau' : Q) T_max weights size next :
  (tau <= 3 # 10)%Q -> (tau' <= 3 # 10)%Q -> Forall (fun w => 3 # 10 < w)%Q weights ->
  merges tau T_max weights size next = merges tau' T_max weights size next.
Proof.
  intros Ht Ht' F. unfold merges. f_equal. unfold total. cbn [plus minus times of_Z zero rational].
  destruct weights as [|w weights].
  - cbn [fold_left count]. change (inject_Z 0) with 0%Q. apply Bool.eq_iff_eq_true. rewrite !rational_less. lra.
  - assert (forall t, (t <= 3 # 10)%Q ->
      ltb 0%Q (fold_left Qplus (w :: weights) 0 - t * inject_Z (count (w :: weights)))%Q = true) as E.
    { intros t T. apply rational_less. rewrite rational_sum.
      assert ((3 # 10) * inject_Z (count (w :: weights)) < fold_right Qplus 0 (w :: weights))%Q as B.
      { clear - F. inversion F as [|? ? Hw G]; subst. cbn [count fold_right]. rewrite inject_Z_plus. change (inject_Z 1) with 1%Q.
        enough ((3 # 10) * inject_Z (count weights) <= fold_right Qplus 0 weights)%Q by lra.
        clear - G. induction G as [|v l Hv G IH]; cbn [count fold_right]; [change (inject_Z 0) with 0%Q; lra|].
        rewrite inject_Z_plus. change (inject_Z 1) with 1%Q. lra. }
      assert (t * inject_Z (count (w :: weights)) <= (3 # 10) * inject_Z (count (w :: weights)))%Q.
      { apply Qmult_le_compat_r; [assumption|]. change 0%Q with (inject_Z 0). rewrite <- Zle_Qle. apply count_nonneg. }
      lra. }
    now rewrite !E.
Qed.

(* FC13: "uniform impact reduces the score to max(D, constant)": the constant is 0. *)
Theorem CC_SCORE_FC13_the_constant_is_0 :
  map Qred (scores (1 # 100000000) 1 (fun x => x) [1 # 4; 0; 1] [1; 1; 1])%Q = [1 # 4; 0; 1]%Q.
Proof. reflexivity. Qed.

(* FC17: "retains exactly half": B = 501 of 1001, a remnant of two: 499 stay. *)
Theorem CC_ALLOCATE_FC17_not_exactly_half :
  sum (502 :: repeat 31 16 ++ [3]) = 1001 /\ sum (allocate 3 (502 :: repeat 31 16 ++ [3]) (1001 - 501)) = 499.
Proof. split; reflexivity. Qed.

(* FC18: one token too many costs a trunk of three wholly. *)
Theorem CC_ALLOCATE_FC18_three_for_one : allocate 3 [3; 4] 1 = [0; 4].
Proof. reflexivity. Qed.

(* Idempotence needs the same B in tokens: a fraction of what is left evicts again. *)
Theorem CC_DISSOLVE_not_idempotent_as_a_fraction :
  kept 3 (tokens (Fraction (1 # 2)) 8) [plain 0 4 0; plain 4 4 1] = [4; 5; 6; 7]
  /\ kept 3 (tokens (Fraction (1 # 2)) 4) [plain 4 4 1] = [].
Proof. split; reflexivity. Qed.

(* The overshoot is not bounded by N_min - 1 where the cut exceeds what may go. *)
Theorem CC_ALLOCATE_needs_a_cut_within_the_sum : sum [2; 2] - sum (allocate 3 [2; 2] 9) < 9.
Proof. reflexivity. Qed.
