# alpha (l - low) / (high - low + epsilon), in units of w = u max l / range: logarithms within 4 ulp (8 u max l), five
# roundings of c = u / w each. c is at most 2 where max l is not below epsilon; below, the radius is roundings alone.
pi1 = (1 + c * w * f1) * (1 + c * w * f4) * (1 + c * w * f5);
pi2 = (1 + c * w * f2) * (1 + c * w * f3);
den = (1 + w * (hi - lo)) * pi2;
{ t in [0, 1] /\ w in [1b-100, 1b-20] /\ |l| <= 8 /\ |lo| <= 8 /\ |hi| <= 8 /\ c in CASE
  /\ |f1| <= 1 /\ |f2| <= 1 /\ |f3| <= 1 /\ |f4| <= 1 /\ |f5| <= 1
  -> |((t + w * (l - lo)) * pi1 / den - t) / w| <= BOUND }
((t + w * (l - lo)) * pi1 / den - t) / w -> (l - (1 - t) * lo - t * hi + (l - lo) * (pi1 - 1) - t * (hi - lo) * (pi2 - 1) + t * ((pi1 - 1) / w) - t * ((pi2 - 1) / w)) / den { w <> 0, den <> 0 };
(pi1 - 1) / w -> c * (f1 + f4 * (1 + c * w * f1) + f5 * (1 + c * w * f1) * (1 + c * w * f4)) { w <> 0 };
(pi2 - 1) / w -> c * (f2 + f3 * (1 + c * w * f2)) { w <> 0 };
