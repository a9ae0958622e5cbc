(* S5: the score of a trunk. spec/crystalcache.md, CC-NORMALISED-IMPACT and CC-SCORE. *)
From Kvspec Require Export Lists.

Section Scoring.
  Context {R : Type} `{Number R}.
  Variables (epsilon alpha : R) (log1p : R -> R).

  Definition least (x y : R) : R := if ltb y x then y else x.
  Definition greatest (x y : R) : R := if ltb x y then y else x.

  (* CC-NORMALISED-IMPACT, of the unprotected trunks alone. *)
  Definition normalised_impact (M_bar : list R) : list R :=
    match map log1p M_bar with
    | [] => []
    | l :: rest =>
        let low := fold_left least rest l in
        let high := fold_left greatest rest l in
        map (fun x => over (minus x low) (plus (minus high low) epsilon)) (l :: rest)
    end.

  (* CC-SCORE *)
  Definition best_path (D M_tilde : R) : R := greatest D (times alpha M_tilde).
  Definition scores (D M_bar : list R) : list R :=
    map (fun '(d, x) => best_path d x) (combine D (normalised_impact M_bar)).
End Scoring.
