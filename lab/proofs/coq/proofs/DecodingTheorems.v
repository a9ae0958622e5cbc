(* Attention as a decoder computes it, and runs of many steps: eviction equals masking. *)
From Coq Require Import Bool.
From Kvspec Require Import ListFacts.
From Kvspec Require Export Masking.


Section Head.
  Context {X : Type} (rotate : Z -> list R -> list R) (l : decoder_layer X).

  Lemma weighted_permutation {A} (w f : A -> R) r s : Permutation r s -> weighted w f r = weighted w f s.
  Proof. unfold weighted. induction 1; cbn; lra. Qed.

  Lemma hidden_permutation {A} (logit value : A -> R) kept r s : Permutation r s -> hidden logit value kept r = hidden logit value kept s.
  Proof. intros P. unfold hidden, average. now rewrite !(weighted_permutation _ _ r s P). Qed.

  (* Stored positions decide, not slots. *)
  Theorem CC_ATTENTION_slots_do_not_matter mask p q store store' :
    Permutation store store' -> attend rotate l mask p q store = attend rotate l mask p q store'.
  Proof. intros P. unfold attend. apply map_ext. intros c. now apply hidden_permutation. Qed.

  (* Weight 0 at what is masked is its absence; the causal mask stays. *)
  Lemma attend_filter mask p q store :
    attend rotate l mask p q store = attend rotate l (fun _ => true) p q (filter (fun t => mask (at_position t)) store).
  Proof.
    unfold attend. apply map_ext. intros c. rewrite !CC_COMPACT_equals_hiding. f_equal. unfold sees.
    induction store as [|t store IH]; cbn; [reflexivity|]. destruct (mask (at_position t)) eqn:E; cbn; [|assumption].
    destruct (at_position t <=? p)%Z; now rewrite IH.
  Qed.

  (* Causal by stored position: what stands above the query counts for nothing. *)
  Theorem CC_ATTENTION_causal mask p q store :
    attend rotate l mask p q store = attend rotate l mask p q (filter (fun t => at_position t <=? p)%Z store).
  Proof.
    unfold attend. apply map_ext. intros c. rewrite !CC_COMPACT_equals_hiding. f_equal. unfold sees.
    induction store as [|t store IH]; cbn; [reflexivity|]. destruct (at_position t <=? p)%Z eqn:E; cbn.
    - destruct (mask (at_position t)); cbn; rewrite ?E; cbn; now rewrite IH.
    - now rewrite andb_false_r.
  Qed.

  (* The formula: exp of the capped, scaled product of the rotated query and the stored key, over those at kept positions
     not above p, divided by their sum. *)
  Theorem CC_ATTENTION_formula mask p q store c : (c < channels l)%nat ->
    let seen := filter (fun t => mask (at_position t) && (at_position t <=? p)%Z) store in
    let w t := exp (soft_cap l (scaling l * inner (rotate p q) (key_at t))) in
    nth c (attend rotate l mask p q store) 0
    = weighted w (fun t => nth c (value_at t) 0) seen / weighted w (fun _ => 1) seen.
  Proof.
    intros Hc seen w. unfold attend.
    rewrite (nth_indep _ 0 (hidden (score_of rotate l p q) (fun t => nth O (value_at t) 0) (sees mask p) store)) by (now rewrite map_length, seq_length).
    rewrite (map_nth (fun c => hidden (score_of rotate l p q) (fun t => nth c (value_at t) 0) (sees mask p) store)), seq_nth by assumption.
    rewrite CC_COMPACT_equals_hiding. reflexivity.
  Qed.
End Head.

(* Query heads in groups: KV head kv is read by the heads from kv * group to (kv + 1) * group. *)
Theorem CC_ATTENTION_groups {X} (l : decoder_layer X) h kv : (0 < group l)%nat ->
  kv_head l h = kv <-> (kv * group l <= h < (kv + 1) * group l)%nat.
Proof.
  intros G. unfold kv_head. split.
  - intros <-. pose proof (Nat.div_mod h (group l) ltac:(lia)). pose proof (Nat.mod_upper_bound h (group l) ltac:(lia)). nia.
  - intros B. symmetry. apply (Nat.div_unique h (group l) kv (h - kv * group l)); nia.
Qed.

(* An inner product adds the products of channels. *)
Theorem CC_ATTENTION_inner x y u v : inner [] [] = 0 /\ inner (x :: u) (y :: v) = x * y + inner u v.
Proof. now split. Qed.

(* Behind what a KV head has stored stands each new token: its position, its key, rotated by that position, its value. *)
Theorem CC_ATTENTION_stores {X} (rotate : Z -> list R -> list R) (here : @holding X) new p x kv :
  stored_with rotate here [] kv = snd here kv
  /\ stored_with rotate here (new ++ [(p, x)]) kv = (stored_with rotate here new kv
       ++ [{| at_position := p; key_at := rotate p (key (fst here) x kv); value_at := content (fst here) x kv |}])%list.
Proof. unfold stored_with. cbn [map]. rewrite app_nil_r, map_app, app_assoc. now split. Qed.

(* A layer, wholly: of each new token its state and, in order, what each query head makes of its own query, at the token's
   position, over what the KV head of its group holds, the new tokens among it. *)
Theorem CC_ATTENTION_layer {X} (rotate : Z -> list R -> list R) (mask : nat -> Z -> bool) (here : @holding X) new i p x :
  nth_error new i = Some (p, x) ->
  let l := fst here in
  exists gave, nth_error (through_layer rotate (attend rotate) mask here new) i = Some (after_attention l x gave)
    /\ length gave = query_heads l
    /\ forall h c, (h < query_heads l)%nat -> (c < channels l)%nat ->
       let kv := (h / group l)%nat in
       let seen := filter (fun t => mask kv (at_position t) && (at_position t <=? p)%Z) (stored_with rotate here new kv) in
       let w t := exp (soft_cap l (scaling l * inner (rotate p (query l x h)) (key_at t))) in
       nth c (nth h gave []) 0 = weighted w (fun t => nth c (value_at t) 0) seen / weighted w (fun _ => 1) seen.
Proof.
  intros I l. eexists. unfold through_layer. split; [|split].
  - rewrite (map_nth_error _ _ _ I). reflexivity.
  - now rewrite map_length, seq_length.
  - intros h c Hh Hc. fold l. cbn zeta. set (one := fun h => attend _ _ _ _ _ _).
    rewrite (nth_indep _ [] (one 0%nat)) by (now rewrite map_length, seq_length). rewrite (map_nth one), seq_nth by assumption.
    unfold one. now rewrite CC_ATTENTION_formula.
Qed.

(* Each layer reads what the one below gave. *)
Theorem CC_ATTENTION_layers {X} (rotate : Z -> list R -> list R) att mask i (here : @holding X) rest seen xs :
  fst (forward rotate att mask i [] seen xs) = xs
  /\ fst (forward rotate att mask i (here :: rest) seen xs)
     = fst (forward rotate att mask (S i) rest seen (through_layer rotate att (mask i) here (numbered seen xs))).
Proof. split; [reflexivity|]. cbn [forward]. now destruct (forward rotate att mask (S i) rest seen _). Qed.

(* What an eviction leaves to each KV head of each layer: of the tokens read so far those of the head's own set. *)
Theorem CC_COMPACT_evicts {X} keep seen layers : forall i j (here : @holding X) kv, nth_error layers j = Some here ->
  (forall t, In t (snd here kv) -> (at_position t < seen)%Z) ->
  exists after, nth_error (evict keep seen i layers) j = Some after /\ fst after = fst here
    /\ snd after kv = filter (fun t => keep (i + j)%nat kv (at_position t)) (snd here kv).
Proof.
  induction layers as [|[l store] layers IH]; intros i [|j] here kv; cbn [nth_error evict]; try discriminate; intros E Old.
  - injection E as <-. eexists. split; [reflexivity|]. split; [reflexivity|]. cbn [snd] in *. rewrite Nat.add_0_r.
    apply filter_ext_in. intros t Ht. unfold leaves. specialize (Old t Ht). apply Z.leb_gt in Old. now rewrite Old, orb_false_r.
  - rewrite Nat.add_succ_r. apply (IH (S i)); assumption.
Qed.

(* Weights of a row sum to 1 where something is seen. *)
Theorem CC_ATTENTION_rows_sum_to_1 {A} (logit : A -> R) (kept : A -> bool) all : filter kept all <> [] ->
  hidden logit (fun _ => 1) kept all = 1.
Proof.
  intros S. rewrite CC_COMPACT_equals_hiding. unfold attention, average.
  pose proof (weighted_positive (weight logit) _ (weight_positive logit) S). field. lra.
Qed.

Section Decoding.
  Context {X : Type} (rotate : Z -> list R -> list R) (next : Z -> list X -> list X).
  Implicit Types (mask keep : mask_of) (full few : list (@holding X)).

  (* The same layers; of what `full` stores, `few` has what the mask leaves. *)
  Fixpoint agrees mask (i : nat) full few : Prop :=
    match full, few with
    | [], [] => True
    | (l, store) :: full, (l', store') :: few =>
        l' = l /\ (forall kv, store' kv = filter (fun t => mask i kv (at_position t)) (store kv)) /\ agrees mask (S i) full few
    | _, _ => False
    end.

  Lemma stored_agree mask i l store store' new kv seen :
    (forall kv p, (seen <= p)%Z -> mask i kv p = true) -> Forall (fun px : Z * X => (seen <= fst px)%Z) new ->
    (forall kv, store' kv = filter (fun t => mask i kv (at_position t)) (store kv)) ->
    stored_with rotate (l, store') new kv = filter (fun t => mask i kv (at_position t)) (stored_with rotate (l, store) new kv).
  Proof.
    intros Late F E. unfold stored_with. cbn [fst snd]. rewrite filter_app, E. f_equal.
    induction F as [|[p x] new Hp F IH]; cbn; [reflexivity|]. cbn in Hp. rewrite Late by assumption. now rewrite <- IH.
  Qed.

  Lemma numbered_late (xs : list X) seen : Forall (fun px => (seen <= fst px)%Z) (numbered seen xs).
  Proof.
    apply Forall_forall. intros [p x] Hp. apply (in_map fst) in Hp. rewrite numbered_fst in Hp. apply in_range in Hp. cbn in *. lia.
  Qed.

  Lemma forward_agrees mask seen : (forall i kv p, (seen <= p)%Z -> mask i kv p = true) ->
    forall full few i xs, agrees mask i full few ->
    fst (forward rotate (attend rotate) mask i full seen xs) = fst (forward rotate (attend rotate) everything i few seen xs)
    /\ agrees mask i (snd (forward rotate (attend rotate) mask i full seen xs)) (snd (forward rotate (attend rotate) everything i few seen xs)).
  Proof.
    intros Late. induction full as [|[l store] full IH]; intros [|[l' store'] few] i xs A; try contradiction; [now split|].
    destruct A as (-> & E & A). cbn [forward fst].
    pose proof (fun kv => stored_agree mask i l store store' _ kv seen (Late i) (numbered_late xs seen) E) as S.
    assert (through_layer rotate (attend rotate) (mask i) (l, store) (numbered seen xs)
            = through_layer rotate (attend rotate) (everything i) (l, store') (numbered seen xs)) as T.
    { unfold through_layer. cbn [fst]. apply map_ext. intros [p x]. f_equal. apply map_ext. intros h.
      rewrite S, attend_filter. reflexivity. }
    rewrite T. specialize (IH few (Datatypes.S i) (through_layer rotate (attend rotate) (everything i) (l, store') (numbered seen xs)) A).
    destruct (forward rotate (attend rotate) mask (Datatypes.S i) full seen _), (forward rotate (attend rotate) everything (Datatypes.S i) few seen _).
    cbn [fst snd] in *. destruct IH as [-> IH]. split; [reflexivity|]. cbn [agrees]. auto.
  Qed.

  Lemma evict_agrees mask keep seen : forall full few i, agrees mask i full few ->
    agrees (fun i kv p => mask i kv p && leaves keep seen i kv p) i full (evict keep seen i few).
  Proof.
    induction full as [|[l store] full IH]; intros [|[l' store'] few] i A; try contradiction; [exact I|].
    destruct A as (-> & E & A). cbn [evict agrees]. split; [reflexivity|]. split; [|now apply IH].
    intros kv. rewrite E. induction (store kv) as [|t r IHr]; cbn; [reflexivity|].
    destruct (mask i kv (at_position t)); cbn; [|assumption]. destruct (leaves keep seen i kv (at_position t)); now rewrite IHr.
  Qed.

  (* What a KV head stores is rotated by the position that is stored with it, whoever the token was. *)
  Definition rotated (here : @holding X) : Prop := forall kv t, In t (snd here kv) ->
    exists x, key_at t = rotate (at_position t) (key (fst here) x kv) /\ value_at t = content (fst here) x kv.

  Lemma forward_rotated mask seen : forall layers i xs, Forall rotated layers -> Forall rotated (snd (forward rotate (attend rotate) mask i layers seen xs)).
  Proof.
    induction layers as [|here layers IH]; intros i xs F; cbn [forward]; [constructor|]. inversion F as [|? ? Hh F']; subst.
    specialize (IH (Datatypes.S i) (through_layer rotate (attend rotate) (mask i) here (numbered seen xs)) F').
    destruct (forward rotate (attend rotate) mask (Datatypes.S i) layers seen _) as [ys held]. cbn [snd] in *. constructor; [|assumption].
    intros kv t Ht. cbn [fst snd] in *. unfold stored_with in Ht. apply in_app_or in Ht as [Ht|Ht]; [now apply Hh|].
    apply in_map_iff in Ht as ([p x] & <- & _). now exists x.
  Qed.

  Lemma evict_rotated keep seen : forall layers i, Forall rotated layers -> Forall rotated (evict keep seen i layers).
  Proof.
    induction layers as [|[l store] layers IH]; intros i F; cbn [evict]; [constructor|]. inversion F as [|? ? Hh F']; subst.
    constructor; [|now apply IH]. intros kv t Ht. cbn [fst snd] in *. apply filter_In in Ht as [Ht _]. now apply (Hh kv t).
  Qed.

  (* Evicting and reading on rotates no stored key again. *)
  Theorem CC_COMPACT_keeps_rotations keep mask seen xs layers : Forall rotated layers ->
    Forall rotated (snd (forward rotate (attend rotate) mask 0 (evict keep seen 0 layers) seen xs)).
  Proof. intros F. now apply forward_rotated, evict_rotated. Qed.

  (* New tokens are stored behind what is there, at the number of tokens seen, however few are stored. *)
  Theorem CC_COMPACT_next_positions att mask seen : forall layers i (xs : list X),
    Forall2 (fun here after : @holding X => fst after = fst here /\ forall kv,
        map at_position (snd after kv) = (map at_position (snd here kv) ++ range seen (seen + count xs))%list)
      layers (snd (forward rotate att mask i layers seen xs)).
  Proof.
    induction layers as [|here layers IH]; intros i xs; cbn [forward]; [constructor|].
    set (ys := through_layer rotate att (mask i) here (numbered seen xs)). specialize (IH (Datatypes.S i) ys).
    assert (count ys = count xs) as C.
    { unfold ys, through_layer. rewrite count_map, <- (count_map snd), numbered_snd. reflexivity. }
    destruct (forward rotate att mask (Datatypes.S i) layers seen ys) as [zs held]. cbn [fst snd] in *. rewrite C in IH.
    constructor; [|exact IH]. split; [reflexivity|]. intros kv. cbn [snd]. unfold stored_with.
    rewrite map_app, map_map, <- numbered_fst. f_equal. apply map_ext. now intros [].
  Qed.

  (* Any run of segments and single steps, with evictions between them, each KV head of each layer by its own set: the
     states are those of the run that evicts nothing and masks what was evicted. *)
  Theorem CC_COMPACT_decoding_equals_masking evictions : forall seen xs (layers : list (@holding X)),
    evicting rotate next evictions seen xs layers = masking rotate next (attend rotate) evictions seen xs everything layers.
  Proof.
    enough (forall seen xs mask full few, (forall i kv p, (seen <= p)%Z -> mask i kv p = true) -> agrees mask 0 full few ->
      evicting rotate next evictions seen xs few = masking rotate next (attend rotate) evictions seen xs mask full) as E.
    { intros seen xs layers. apply E; [reflexivity|]. generalize 0%nat as i.
      induction layers as [|[l store] layers IH]; intros i; cbn; [exact I|]. split; [reflexivity|]. split; [|apply IH].
      intros kv. induction (store kv) as [|t r IHr]; cbn; congruence. }
    induction evictions as [|keep evictions IH]; intros seen xs mask full few Late A; cbn [evicting masking]; [reflexivity|].
    set (left := fun i kv p => mask i kv p && leaves keep seen i kv p).
    assert (forall i kv p, (seen <= p)%Z -> left i kv p = true) as Late'.
    { intros i kv p Hp. unfold left, leaves. rewrite Late by assumption. apply Z.leb_le in Hp. rewrite Hp. apply orb_true_r. }
    pose proof (forward_agrees left seen Late' full (evict keep seen 0 few) 0 xs (evict_agrees mask keep seen full few 0 A)) as [F G].
    destruct (forward rotate (attend rotate) left 0 full seen xs) as [ys held], (forward rotate (attend rotate) everything 0 (evict keep seen 0 few) seen xs) as [ys' held'].
    cbn [fst snd] in F, G. subst ys'. f_equal. apply IH; [|assumption].
    intros i kv p Hp. apply Late'. pose proof (count_nonneg xs). lia.
  Qed.
End Decoding.
