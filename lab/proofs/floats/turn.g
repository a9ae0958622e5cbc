# x cos - y sin of channels no larger than the norm, 1: cosine and sine within 1 ulp (u, as they are at most 1).
@rnd = float<ieee_64, ne>;
{ x in [-1, 1] /\ y in [-1, 1] /\ c in [-1, 1] /\ s in [-1, 1] /\ |ca - c| <= 1b-53 /\ |sa - s| <= 1b-53
  -> |(rnd(rnd(x * ca) - rnd(y * sa)) - (x * c - y * s)) * 1b53| <= BOUND }
