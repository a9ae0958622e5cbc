(* The order of binary64, by Flocq: numbers that are not NaN, with its comparison and its roundings to nearest, are Ordered.
   So the theorems about ties, which hold of any Ordered type, hold of binary64. *)
From Coq Require Import Reals Lra.
From Flocq Require Import Core BinarySingleNaN.
From Kvspec Require Import CountTheorems SelectionTheorems DiversityTheorems EdgeTheorems.
Open Scope R_scope.

Notation float64 := (binary_float 53 1024).
#[local] Instance precision : Prec_gt_0 53 := eq_refl.
#[local] Instance exponent : Prec_lt_emax 53 1024 := eq_refl.

Definition number64 : Type := { x : float64 | is_nan x = false }.

(* A result that is NaN is no number. No theorem below looks at one: 0 stands for it. *)
Definition as_number (x : float64) : number64 :=
  match x with
  | B754_nan => exist _ (B754_zero false) eq_refl
  | B754_zero s => exist _ (B754_zero s) eq_refl
  | B754_infinity s => exist _ (B754_infinity s) eq_refl
  | B754_finite s m e b => exist _ (B754_finite s m e b) eq_refl
  end.

Lemma as_number_same x : is_nan x = false -> proj1_sig (as_number x) = x.
Proof. now destruct x. Qed.

#[export] Instance rounded : Number number64 := {
  zero := as_number (B754_zero false);
  plus x y := as_number (Bplus mode_NE (proj1_sig x) (proj1_sig y));
  minus x y := as_number (Bminus mode_NE (proj1_sig x) (proj1_sig y));
  times x y := as_number (Bmult mode_NE (proj1_sig x) (proj1_sig y));
  over x y := as_number (Bdiv mode_NE (proj1_sig x) (proj1_sig y));
  of_Z z := as_number (binary_normalize 53 1024 _ _ mode_NE z 0 false);
  ltb x y := Bltb (proj1_sig x) (proj1_sig y)
}.

(* The real number, with the infinities beyond all others. *)
Definition extended (x : float64) : R :=
  match x with
  | B754_infinity true => - bpow radix2 1024
  | B754_infinity false => bpow radix2 1024
  | _ => B2R x
  end.

Lemma extended_finite x : is_finite x = true -> extended x = B2R x /\ - bpow radix2 1024 < B2R x < bpow radix2 1024.
Proof.
  intros F. split; [now destruct x|]. pose proof (abs_B2R_lt_emax 53 1024 x) as B. now apply Rabs_lt_inv in B.
Qed.

Lemma less_extended x y : is_nan x = false -> is_nan y = false -> Bltb x y = Rlt_bool (extended x) (extended y).
Proof.
  intros Nx Ny. pose proof (bpow_gt_0 radix2 1024) as P. symmetry.
  destruct (is_finite x) eqn:Fx, (is_finite y) eqn:Fy.
  - rewrite Bltb_correct by assumption. now rewrite (proj1 (extended_finite x Fx)), (proj1 (extended_finite y Fy)).
  - destruct (extended_finite x Fx) as [-> [L U]].
    destruct y as [| [] | |]; try discriminate; cbn [extended]; [rewrite Rlt_bool_false by lra|rewrite Rlt_bool_true by lra]; now destruct x as [| | |[]].
  - destruct (extended_finite y Fy) as [-> [L U]].
    destruct x as [| [] | |]; try discriminate; cbn [extended]; [rewrite Rlt_bool_true by lra|rewrite Rlt_bool_false by lra]; now destruct y as [| | |[]].
  - destruct x as [| [] | |], y as [| [] | |]; try discriminate; cbn [extended];
      first [rewrite Rlt_bool_true by lra; reflexivity|rewrite Rlt_bool_false by lra; reflexivity].
Qed.

(* Two finite numbers are compared as the real numbers that they are. *)
Theorem CC_DISSOLVE_binary64_compares_reals (x y : number64) : is_finite (proj1_sig x) = true -> is_finite (proj1_sig y) = true ->
  ltb x y = true <-> B2R (proj1_sig x) < B2R (proj1_sig y).
Proof.
  intros Fx Fy. cbn [ltb rounded]. rewrite Bltb_correct by assumption. split.
  - destruct (Rlt_bool_spec (B2R (proj1_sig x)) (B2R (proj1_sig y))); [easy|discriminate].
  - apply Rlt_bool_true.
Qed.

(* The two zeros tie, and an infinity is beyond every finite number. *)
Theorem CC_DISSOLVE_binary64_signed_zeros_tie :
  let plus_zero := as_number (B754_zero false) in let minus_zero := as_number (B754_zero true) in
  ltb plus_zero minus_zero = false /\ ltb minus_zero plus_zero = false.
Proof. now split. Qed.

#[export] Instance binary64_ordered : Ordered number64.
Proof.
  split; intros [x Nx] [y Ny]; [|intros [z Nz]]; cbn [ltb rounded proj1_sig]; rewrite !less_extended by assumption.
  - intros L. destruct (Rlt_bool_spec (extended x) (extended y)); [apply Rlt_bool_false; lra|discriminate].
  - intros L. destruct (Rlt_bool_spec (extended x) (extended z)) as [XZ|]; [|discriminate].
    destruct (Rlt_le_dec (extended x) (extended y)) as [XY|YX]; [left|right]; apply Rlt_bool_true; lra.
Qed.

(* What is kept, of scores and impacts in binary64. *)
Theorem CC_DISSOLVE_kept_in_binary64 N_min s (all : list (trunk number64)) B x : laid_out s all ->
  In x (kept N_min B all) <->
  exists g M, In g all /\ In (x, M) (numbered (start g) (members g)) /\ (stronger g x M < staying N_min all B g)%Z.
Proof. intros L. exact (CC_DISSOLVE_kept N_min s all L B x). Qed.

Theorem DV_GREEDY_in_binary64 lambda similarity (scores : list number64) retained k : length retained = length scores ->
  let before := map fst (filter (fun t => snd t) (numbered 0 retained)) in
  exists picks, diverse lambda similarity scores retained k = sort Z.leb (before ++ picks)
    /\ greedy lambda similarity scores before picks
    /\ count picks = Z.max 0 (Z.min (k - count before) (count scores - count before)).
Proof. apply DV_GREEDY_is_greedy. Qed.
