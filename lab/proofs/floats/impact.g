# M_max (S / M_max / 2 + U / 2), from a rarity that errs by 8 u (rarity.g). Halves are exact; the clip moves nothing on.
@rnd = float<ieee_64, ne>;
M = top * (S / top / 2 + U / 2);
Ma = rnd(top * rnd(rnd(S / top) / 2 + Ua / 2));
{ S in [1b-200, 1b200] /\ top in [1b-200, 1b200] /\ U in [0.01, 1] /\ Ua -/ U in [-1b-50, 1b-50]
  -> |(Ma - M) / M * 1b53| <= BOUND }
