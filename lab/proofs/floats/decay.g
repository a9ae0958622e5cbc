# D' / D = 1 - beta_0 E, with E = exp(-D Mbar / D_c) in [0, 1], of an exponent that is the same bits on either side. Ea
# is within 4 ulp and not above 1: 4 u. D times rho and the difference round by u each.
@rnd = float<ieee_64, ne>;
p = rnd(beta * Ea);
{ E in [0, 1] /\ Ea in [0, 1] /\ |Ea - E| <= 4b-53 /\ beta in [0, 1] /\ |e1| <= 1b-53 /\ |e2| <= 1b-53
  -> |((1 - p * (1 + e1)) * (1 + e2) - (1 - beta * E)) * 1b53| <= BOUND }
(1 - p * (1 + e1)) * (1 + e2) - (1 - beta * E) -> (1 - p) * e2 - p * e1 * (1 + e2) - (p - beta * Ea) - beta * (Ea - E);
$ p in 16;
