(* CC-BUDGET-FORMS: which texts are budgets, and what they ask for. The grammar is stated as the item has it; `parse` accepts
   its texts and no other, with their value. *)
From Kvspec Require Export ListFacts Budgets.
Local Open Scope string_scope.

Definition is_digit (c : ascii) : Prop := exists d, digit c = Some d.
Fixpoint all_digits (s : string) : Prop :=
  match s with
  | EmptyString => True
  | String c s => is_digit c /\ all_digits s
  end.
Fixpoint all_spaces (s : string) : Prop :=
  match s with
  | EmptyString => True
  | String c s => c = " "%char /\ all_spaces s
  end.

Definition len (s : string) : Z := Z.of_nat (String.length s).

(* The number that digits write, by their places. *)
Fixpoint number (s : string) : Z :=
  match s with
  | EmptyString => 0
  | String c s => match digit c with Some d => d * 10 ^ len s | None => 0 end + number s
  end.

(* count = digit+; fraction = decimal | decimal "%" | digit+ "%"; decimal = digit+ "." digit* | "." digit+ *)
Inductive form : string -> budget -> Prop :=
| count_form w : all_digits w -> w <> "" -> form w (Count (number w))
| decimal_form w f : all_digits w -> all_digits f -> w ++ f <> "" ->
    form (w ++ "." ++ f) (Fraction (inject_Z (number (w ++ f)) / inject_Z (10 ^ len f)))
| percent_form w : all_digits w -> w <> "" -> form (w ++ "%") (Fraction (inject_Z (number w) / 100))
| decimal_percent_form w f : all_digits w -> all_digits f -> w ++ f <> "" ->
    form (w ++ "." ++ f ++ "%") (Fraction (inject_Z (number (w ++ f)) / inject_Z (10 ^ len f) / 100)).

(* A fraction in (0, 1], a count from 1 to 2^63 - 1. *)
Definition in_bounds (b : budget) : Prop :=
  match b with
  | Fraction beta => (0 < beta <= 1)%Q
  | Count c => 1 <= c <= 9223372036854775807
  end.

(* A digit is one of 0123456789, with its value. *)
Theorem CC_BUDGET_FORMS_digits c d : digit c = Some d <->
  In (c, d) [("0"%char, 0); ("1"%char, 1); ("2"%char, 2); ("3"%char, 3); ("4"%char, 4); ("5"%char, 5); ("6"%char, 6);
             ("7"%char, 7); ("8"%char, 8); ("9"%char, 9)].
Proof.
  split.
  - destruct c as [[] [] [] [] [] [] [] []]; vm_compute; try discriminate; intros E; injection E as <-; repeat first [left; reflexivity | right].
  - intros I. repeat destruct I as [[= <- <-]|I]; [reflexivity..|contradiction].
Qed.

(* ---- strings ---- *)

Lemma append_assoc a b c : (a ++ b) ++ c = a ++ b ++ c.
Proof. induction a as [|x a IH]; cbn; [|rewrite IH]; reflexivity. Qed.

Lemma append_nil a : a ++ "" = a.
Proof. induction a as [|x a IH]; cbn; [|rewrite IH]; reflexivity. Qed.

Lemma len_append a b : len (a ++ b) = len a + len b.
Proof. unfold len. induction a as [|x a IH]; cbn [String.append String.length]; lia. Qed.

Lemma len_nonneg s : 0 <= len s.
Proof. unfold len. lia. Qed.

Lemma len_positive s : s <> "" <-> 0 < len s.
Proof. destruct s; unfold len; cbn [String.length]; split; try easy; lia. Qed.

Lemma number_append a b : number (a ++ b) = number a * 10 ^ len b + number b.
Proof.
  induction a as [|c a IH]; cbn [String.append number]; [lia|]. rewrite IH, len_append, Z.pow_add_r by apply len_nonneg.
  destruct (digit c); lia.
Qed.

(* No digit, or nothing at all, comes next. *)
Definition no_digit (s : string) : Prop := match s with EmptyString => True | String c _ => digit c = None end.

Lemma digits_split s : exists w rest, s = w ++ rest /\ all_digits w /\ no_digit rest.
Proof.
  induction s as [|c s (w & rest & -> & W & N)]; [exists "", ""; easy|]. destruct (digit c) as [d|] eqn:E.
  - exists (String c w), rest. repeat split; [now exists d|assumption..].
  - exists "", (String c (w ++ rest)). repeat split. exact E.
Qed.

Lemma digits_read w rest : all_digits w -> no_digit rest -> forall value seen,
  digits value seen (w ++ rest) = (value * 10 ^ len w + number w, seen + len w, rest).
Proof.
  intros W N. induction w as [|c w IH]; intros value seen; cbn [String.append].
  - unfold len. cbn [number String.length]. replace (value * 10 ^ Z.of_nat 0 + 0) with value by (cbn; lia).
    replace (seen + Z.of_nat 0) with seen by lia. destruct rest as [|c rest]; cbn in *; [reflexivity|]. now rewrite N.
  - destruct W as [[d E] W]. cbn [digits number]. rewrite E, (IH W).
    assert (len (String c w) = 1 + len w) as -> by (unfold len; cbn [String.length]; lia).
    rewrite Z.pow_add_r by (lia || apply len_nonneg). apply f_equal2; [apply f_equal2|reflexivity]; [change (10 ^ 1) with 10|]; lia.
Qed.

Lemma spaces_stop c s : c <> " "%char -> spaces (String c s) = String c s.
Proof. intros N. destruct c as [[] [] [] [] [] [] [] []]; try reflexivity. now elim N. Qed.

Lemma spaces_split s : exists l rest, s = l ++ rest /\ all_spaces l /\ spaces rest = rest /\ spaces s = rest.
Proof.
  induction s as [|c s (l & rest & -> & L & R & E)]; [exists "", ""; easy|]. destruct (ascii_dec c " ") as [->|N].
  - exists (String " " l), rest. repeat split; assumption.
  - exists "", (String c (l ++ rest)). pose proof (spaces_stop c (l ++ rest) N) as F. repeat split; assumption.
Qed.

Lemma spaces_read l rest : all_spaces l -> spaces (l ++ rest) = spaces rest.
Proof. induction l as [|c l IH]; [easy|]. intros [-> L]. cbn. now apply IH. Qed.

Lemma spaces_all l : all_spaces l -> spaces l = "".
Proof. intros L. rewrite <- (append_nil l), spaces_read by assumption. reflexivity. Qed.

Lemma spaces_none s : spaces s = "" -> all_spaces s.
Proof. destruct (spaces_split s) as (l & rest & -> & L & _ & E). rewrite E. intros ->. now rewrite append_nil. Qed.

Lemma admitted_in_bounds b b' : admitted b = Some b' <-> b' = b /\ in_bounds b.
Proof.
  destruct b as [beta|c]; cbn [admitted in_bounds].
  - rewrite <- Qle_bool_iff. destruct (Qle_bool beta 0) eqn:E; cbn [negb andb].
    + apply Qle_bool_iff in E. split; [easy|]. intros (_ & L & _). apply Qlt_not_le in L. contradiction.
    + apply not_true_iff_false in E. rewrite Qle_bool_iff in E. apply Qnot_le_lt in E.
      destruct (Qle_bool beta 1); (split; [|intros (-> & _ & F); try reflexivity; discriminate]); [|easy].
      intros X. injection X as <-. auto.
  - change largest with 9223372036854775807. destruct (Z.leb_spec 1 c), (Z.leb_spec c 9223372036854775807); cbn [andb];
      (split; [|intros (-> & ?); try reflexivity; lia]); try easy. intros X. injection X as <-. auto.
Qed.

Lemma ended_rest rest b b' : ended rest b = Some b' <-> all_spaces rest /\ b' = b /\ in_bounds b.
Proof.
  unfold ended. rewrite <- admitted_in_bounds. destruct (spaces rest) eqn:E.
  - apply spaces_none in E. tauto.
  - split; [easy|]. intros [L _]. apply spaces_all in L. congruence.
Qed.

Lemma spaces_no_digit s : all_spaces s -> no_digit s.
Proof. destruct s; [easy|]. intros [-> _]. reflexivity. Qed.

(* ---- the grammar ---- *)

(* What stands before the closing spaces. *)
Definition body (text : string) (b : budget) : Prop :=
  exists core right, text = core ++ right /\ all_spaces right /\ form core b /\ in_bounds b.

Definition after_spaces (text : string) : option budget :=
  let '(whole, before, rest) := digits 0 0 text in
  match rest with
  | String "." rest =>
      let '(part, after, rest) := digits 0 0 rest in
      if (before + after <=? 0)%Z then None else
      let beta := share whole part after in
      match rest with
      | String "%" rest => ended rest (Fraction (beta / 100))
      | _ => ended rest (Fraction beta)
      end
  | String "%" rest => if (before <=? 0)%Z then None else ended rest (Fraction (inject_Z whole / 100))
  | _ => if (before <=? 0)%Z then None else ended rest (Count whole)
  end.

Lemma form_not_empty b : ~ form "" b.
Proof. intros F. inversion F as [w D N E|w f D ? ? E|w D ? E|w f D ? ? E]; try (now destruct w). Qed.

Lemma decimal_value w f : share (number w) (number f) (len f) = (inject_Z (number (w ++ f)) / inject_Z (10 ^ len f))%Q.
Proof. unfold share. now rewrite number_append. Qed.

Lemma read_digits w rest : all_digits w -> no_digit rest -> digits 0 0 (w ++ rest) = (number w, len w, rest).
Proof. intros W N. rewrite digits_read by assumption. apply f_equal2; [apply f_equal2|reflexivity]; lia. Qed.

Lemma accepts text b : body text b -> after_spaces text = Some b.
Proof.
  intros (core & right & -> & S & F & B). pose proof (spaces_no_digit _ S) as N.
  assert (forall b', in_bounds b' -> ended right b' = Some b') as End by (intros; now apply ended_rest).
  unfold after_spaces. destruct F as [w D W|w f D E W|w D W|w f D E W].
  - rewrite read_digits by assumption. apply len_positive in W. destruct (Z.leb_spec (len w) 0); [lia|].
    destruct right as [|c right]; [now apply End|]. destruct S as [-> S]. now apply End.
  - rewrite append_assoc. rewrite read_digits by easy. cbn [String.append]. rewrite read_digits by assumption.
    apply len_positive in W. rewrite len_append in W. destruct (Z.leb_spec (len w + len f) 0); [lia|]. rewrite decimal_value.
    destruct right as [|c right]; [now apply End|]. destruct S as [-> S]. now apply End.
  - rewrite append_assoc. rewrite read_digits by easy. cbn [String.append]. apply len_positive in W.
    destruct (Z.leb_spec (len w) 0); [lia|]. now apply End.
  - rewrite !append_assoc. rewrite read_digits by easy. cbn [String.append]. rewrite read_digits by easy. cbn [String.append].
    apply len_positive in W. rewrite len_append in W. destruct (Z.leb_spec (len w + len f) 0); [lia|]. rewrite decimal_value. now apply End.
Qed.

Lemma accepted text b : after_spaces text = Some b -> body text b.
Proof.
  destruct (digits_split text) as (w & rest & -> & D & N). unfold after_spaces. rewrite read_digits by assumption.
  assert (forall rest, (if (len w <=? 0)%Z then None else ended rest (Count (number w))) = Some b ->
          body (w ++ rest) b) as Plain.
  { intros r. destruct (Z.leb_spec (len w) 0); [easy|]. intros E. apply ended_rest in E as (S & -> & B).
    exists w, r. refine (conj eq_refl (conj S (conj _ B))). apply count_form; [assumption|now apply len_positive]. }
  destruct rest as [|c rest]; [apply Plain|].
  destruct (ascii_dec c ".") as [->|Np].
  - destruct (digits_split rest) as (f & end_ & -> & E & M). rewrite read_digits by assumption.
    destruct (Z.leb_spec (len w + len f) 0); [easy|]. rewrite decimal_value.
    assert (w ++ f <> "") as W by (apply len_positive; rewrite len_append; lia).
    assert (forall r, ended r (Fraction (inject_Z (number (w ++ f)) / inject_Z (10 ^ len f))) = Some b -> body (w ++ "." ++ f ++ r) b) as Dec.
    { intros r X. apply ended_rest in X as (S & -> & B). exists (w ++ "." ++ f), r.
      refine (conj _ (conj S (conj _ B))); [now rewrite !append_assoc|now apply decimal_form]. }
    destruct end_ as [|d end_]; [exact (Dec "")|]. destruct (ascii_dec d "%") as [->|Nc].
    + intros X. apply ended_rest in X as (S & -> & B). exists (w ++ "." ++ f ++ "%"), end_.
      refine (conj _ (conj S (conj _ B))); [now rewrite !append_assoc|now apply decimal_percent_form].
    + specialize (Dec (String d end_)). intros X. apply Dec. rewrite <- X. destruct d as [[] [] [] [] [] [] [] []]; try reflexivity. now elim Nc.
  - destruct (ascii_dec c "%") as [->|Nc].
    + destruct (Z.leb_spec (len w) 0); [easy|]. intros E. apply ended_rest in E as (S & -> & B).
      exists (w ++ "%"), rest.
      refine (conj _ (conj S (conj _ B))); [now rewrite append_assoc|apply percent_form; [assumption|now apply len_positive]].
    + specialize (Plain (String c rest)). intros X. apply Plain. rewrite <- X.
      destruct c as [[] [] [] [] [] [] [] []]; try reflexivity; [now elim Np|now elim Nc].
Qed.

(* A text of at most 64 characters that, but for spaces around it, has one of the four forms, within its bounds; and the
   value is the one that is written. *)
Theorem CC_BUDGET_FORMS_grammar text b : parse text = Some b <->
  len text <= 64 /\ exists left core right, text = left ++ core ++ right
    /\ all_spaces left /\ all_spaces right /\ form core b /\ in_bounds b.
Proof.
  assert (parse text = if (64 <? len text)%Z then None else after_spaces (spaces text)) as -> by reflexivity.
  destruct (Z.ltb_spec 64 (len text)) as [L|L]; [split; [easy|lia]|]. split.
  - intros E. split; [lia|]. apply accepted in E as (core & right & E & S & F & B).
    destruct (spaces_split text) as (left & rest & T & Sl & _ & R). exists left, core, right.
    refine (conj _ (conj Sl (conj S (conj F B)))). now rewrite T, <- R, E.
  - intros (_ & left & core & right & -> & Sl & S & F & B). apply accepts. exists core, right. refine (conj _ (conj S (conj F B))).
    rewrite spaces_read by assumption. destruct core as [|c core]; [now apply form_not_empty in F|]. cbn [String.append].
    apply spaces_stop. intros ->. clear - F. inversion F as [w D ? E|w f D ? ? E|w D ? E|w f D ? ? E];
      destruct w as [|c w]; try discriminate; injection E as -> _; destruct D as [[d D] _]; discriminate.
Qed.

(* A text has one value at most. *)
Theorem CC_BUDGET_FORMS_one_value left core right b left' core' right' b' : len (left ++ core ++ right) <= 64 ->
  left ++ core ++ right = left' ++ core' ++ right' ->
  all_spaces left -> all_spaces right -> form core b -> in_bounds b ->
  all_spaces left' -> all_spaces right' -> form core' b' -> in_bounds b' -> b = b'.
Proof.
  intros L E Sl Sr F B Sl' Sr' F' B'.
  assert (parse (left ++ core ++ right) = Some b) as P by (apply CC_BUDGET_FORMS_grammar; split; [assumption|]; now exists left, core, right).
  assert (parse (left ++ core ++ right) = Some b') as P' by (apply CC_BUDGET_FORMS_grammar; split; [assumption|]; now exists left', core', right').
  congruence.
Qed.
