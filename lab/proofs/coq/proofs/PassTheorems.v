(* CC-TRUNKS: which sentences the one pass joins. *)
From Kvspec Require Export TrunkTheorems.

Section OnePass.
  Context {R : Type} `{Number R}.
  Variables (tau : R) (T_max : Z) (E : Z -> Z -> list R).

  (* The sentence [b, b + size) against the trunk that runs from a to b. *)
  Definition joins (a b size : Z) : bool :=
    merges tau T_max (interface_edges E (last5 a b) (first5 b (b + size))) (b - a) size.

  Lemma offsets_head start sizes : exists rest, offsets start sizes = start :: rest.
  Proof. destruct sizes; cbn; eauto. Qed.

  Lemma offsets_from sizes : Forall (fun s => 1 <= s) sizes -> forall start x, In x (offsets start sizes) -> x = start \/ start < x.
  Proof.
    induction 1 as [|s sizes Hs F IH]; intros start x; cbn; [intros [->|[]]; now left|].
    intros [->|Hx]; [now left|right]. apply IH in Hx. lia.
  Qed.

  Lemma merged_from next : forall start stop, Forall (fun s => 1 <= s) next ->
    incl (offsets start (merge_sentences tau T_max E start stop next)) (start :: offsets stop next).
  Proof.
    induction next as [|size rest IH]; intros start stop F; cbn [merge_sentences].
    - cbn [offsets]. replace (start + (stop - start)) with stop by lia. easy.
    - inversion F as [|? ? Hs F']; subst. destruct merges.
      + intros x Hx. destruct (IH _ _ F' x Hx) as [->|I]; [now left|]. right. right. exact I.
      + cbn [offsets]. replace (start + (stop - start)) with stop by lia. intros x [->|Hx]; [now left|].
        destruct (IH _ _ F' x Hx) as [->|I]; right; [now left|now right].
  Qed.

  (* Ends of trunks, before the splits, are ends of sentences; and the sentence that begins at b joins the trunk that runs
     there (from a, the last end of a trunk before b) exactly where CC-MERGE says so: then b is no end of a trunk. *)
  Lemma one_pass_step before size after : forall start stop, start < stop ->
    Forall (fun s => 1 <= s) (before ++ size :: after) ->
    let ends := offsets start (merge_sentences tau T_max E start stop (before ++ size :: after)) in
    let b := stop + sum before in
    incl ends (start :: offsets stop (before ++ size :: after))
    /\ exists a, In a ends /\ a < b /\ (forall x, In x ends -> x < b -> x <= a) /\ (In b ends <-> joins a b size = false).
  Proof.
    induction before as [|s before IH]; intros start stop Hs F ends b; (split; [now apply merged_from|]); subst ends b; cbn [app sum] in *.
    - rewrite Z.add_0_r. exists start. cbn [merge_sentences]. inversion F as [|? ? Hz F']; subst. fold (joins start stop size).
      destruct (joins start stop size) eqn:J.
      + pose proof (merged_from after start (stop + size) F') as I.
        assert (forall x, In x (offsets start (merge_sentences tau T_max E start (stop + size) after)) -> x = start \/ stop < x) as Out.
        { intros x Hx. apply I in Hx as [->|Hx]; [now left|right]. apply (offsets_from after F') in Hx. lia. }
        repeat split; [|assumption| |intros X; apply Out in X; lia|discriminate].
        * destruct (offsets_head start (merge_sentences tau T_max E start (stop + size) after)) as [r ->]. now left.
        * intros x Hx L. apply Out in Hx. lia.
      + pose proof (merged_from after stop (stop + size) F') as I. cbn [offsets]. replace (start + (stop - start)) with stop by lia.
        repeat split; [now left|assumption| |].
        * intros x [->|Hx] L; [lia|]. apply I in Hx as [->|Hx]; [lia|]. apply (offsets_from after F') in Hx. lia.
        * intros _. right. destruct (offsets_head stop (merge_sentences tau T_max E stop (stop + size) after)) as [r ->]. now left.
    - inversion F as [|? ? Hz F']; subst. rewrite Z.add_assoc. cbn [merge_sentences]. destruct merges.
      + apply IH; [lia|assumption].
      + destruct (IH stop (stop + s) ltac:(lia) F') as [I (a & Ha & L & G & M)].
        cbn [offsets]. replace (start + (stop - start)) with stop by lia.
        assert (0 <= sum before) as P.
        { apply sum_nonneg. apply Forall_app in F' as [F' _]. eapply Forall_impl; [|exact F']. cbn beta. lia. }
        assert (stop <= a) as A by (apply I in Ha as [->|Ha]; [lia|]; apply (offsets_from _ F') in Ha; lia).
        exists a. repeat split; [now right|assumption| | |].
        * intros x [->|Hx] X; [lia|now apply G].
        * intros [X|X]; [lia|now apply M].
        * intros J. right. now apply M.
  Qed.

  (* `groups` is what one pass over sentences makes: whole sentences side by side, and the sentence that begins at b joins
     what runs there, from the last end a of a group before b, exactly where CC-MERGE says so; then no group ends at b. *)
  Definition one_pass (start : Z) (sizes groups : list Z) : Prop :=
    let ends := offsets start groups in
    Forall (fun s => 1 <= s) groups /\ incl ends (offsets start sizes) /\ In (start + sum sizes) ends
    /\ forall before size after, sizes = before ++ size :: after -> before <> [] ->
         exists a, In a ends /\ a < start + sum before /\ (forall x, In x ends -> x < start + sum before -> x <= a)
                   /\ (In (start + sum before) ends <-> joins a (start + sum before) size = false).

  Lemma last_end sizes : forall start, In (start + sum sizes) (offsets start sizes).
  Proof. induction sizes as [|s l IH]; intros start; cbn [offsets sum]; [left; lia|right]. rewrite Z.add_assoc. apply IH. Qed.

  (* The trunks are these groups, each split where it is too long. *)
  Theorem CC_TRUNKS_one_pass start ends : exists groups,
    trunks tau T_max E start ends = flat_map (split T_max) groups /\ one_pass start (sentences 0 ends) groups.
  Proof.
    pose proof (sentences_no_empty_one ends) as P. unfold trunks. destruct (sentences 0 ends) as [|first rest] eqn:S.
    - exists []. split; [reflexivity|]. unfold one_pass. cbn [offsets sum]. rewrite Z.add_0_r. split; [constructor|].
      split; [easy|]. split; [now left|]. intros [] size after D; discriminate.
    - inversion P as [|? ? Hf F]; subst. eexists. split; [reflexivity|].
      destruct (merge_sentences_partition tau T_max E rest start (start + first) ltac:(lia) F) as [T G].
      split; [exact G|]. split; [exact (merged_from rest start (start + first) F)|]. split.
      + cbn [sum]. replace (start + (first + sum rest)) with (start + (start + first - start + sum rest)) by lia. rewrite <- T. apply last_end.
      + intros [|s before] size after D N; [easy|]. injection D as <- ->.
        destruct (one_pass_step before size after start (start + first) ltac:(lia) F) as [_ X].
        cbn [sum]. rewrite Z.add_assoc. exact X.
  Qed.

  Lemma end_of_sentences sizes : forall start x, In x (offsets start sizes) ->
    x = start \/ x = start + sum sizes \/ exists before size after, sizes = before ++ size :: after /\ before <> [] /\ x = start + sum before.
  Proof.
    induction sizes as [|s l IH]; intros start x; cbn [offsets sum In].
    - intros [->|[]]. now left.
    - intros [->|Hx]; [now left|]. right. destruct (IH _ _ Hx) as [->|[->|(before & size & after & -> & N & ->)]].
      + destruct l as [|t l]; [left; cbn; lia|]. right. exists [s], t, l. cbn. split; [reflexivity|]. split; [easy|lia].
      + left. lia.
      + right. exists (s :: before), size, after. cbn [sum app]. split; [reflexivity|]. split; [easy|lia].
  Qed.

  Lemma offsets_ascend sizes : Forall (fun s => 1 <= s) sizes -> forall start, StronglySorted Z.lt (offsets start sizes).
  Proof.
    induction 1 as [|s l Hs F IH]; intros start; cbn [offsets]; [repeat constructor|]. constructor; [apply IH|].
    apply Forall_forall. intros x Hx. apply (offsets_from l F) in Hx. lia.
  Qed.

  Lemma offsets_injective l : forall r start, offsets start l = offsets start r -> l = r.
  Proof.
    induction l as [|s l IH]; intros [|t r] start D; cbn [offsets] in D; [reflexivity|..].
    - destruct (offsets_head (start + t) r) as [x X]. rewrite X in D. discriminate.
    - destruct (offsets_head (start + s) l) as [x X]. rewrite X in D. discriminate.
    - injection D as D. destruct (offsets_head (start + s) l) as [x X], (offsets_head (start + t) r) as [y Y].
      assert (s = t) as <- by (rewrite X, Y in D; injection D; lia). f_equal. now apply (IH r (start + s)).
  Qed.

  (* One pass makes one list of groups. *)
  Theorem CC_TRUNKS_one_way start sizes groups groups' :
    one_pass start sizes groups -> one_pass start sizes groups' -> groups = groups'.
  Proof.
    intros (P & I & L & G) (P' & I' & L' & G').
    assert (forall x, In x (offsets start sizes) -> In x (offsets start groups) <-> In x (offsets start groups')) as Same.
    { enough (forall m x, x < start + Z.of_nat m -> In x (offsets start sizes) -> In x (offsets start groups) <-> In x (offsets start groups')) as X.
      { intros x. apply (X (Z.to_nat (x - start + 1))). lia. }
      induction m as [|m IH]; intros x Hx Sx.
      - split; intros J; apply offsets_from in J; try assumption; lia.
      - destruct (end_of_sentences _ _ _ Sx) as [->|[->|(before & size & after & D & N & ->)]].
        + destruct (offsets_head start groups) as [? ->], (offsets_head start groups') as [? ->]. split; now left.
        + tauto.
        + destruct (G before size after D N) as (a & A & La & Ga & J), (G' before size after D N) as (a' & A' & La' & Ga' & J').
          assert (a = a') as <-; [|now rewrite J, J'].
          apply Z.le_antisymm; [apply Ga'|apply Ga]; try assumption.
          { apply (IH a ltac:(lia) (I a A)). exact A. }
          { apply (IH a' ltac:(lia) (I' a' A')). exact A'. } }
    apply (offsets_injective groups groups' start), (ascending_unique (fun x => x)); [now apply offsets_ascend..|].
    apply NoDup_Permutation; [now apply ascending_NoDup, offsets_ascend..|].
    intros x. split; intros J; apply Same; auto.
  Qed.
End OnePass.
