# The mean times the root of the density. Both of these are the same bits on either side; the root errs by 1 ulp (2 u).
@rnd = float<ieee_64, ne>;
W = mean * r;
Wa = rnd(mean * ra);
{ mean in [1b-200, 1b200] /\ r in [1b-200, 1b60] /\ ra -/ r in [-1b-52, 1b-52] -> |(Wa - W) / W * 1b53| <= BOUND }
