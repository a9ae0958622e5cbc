# D = P / (1 + P) of P = exp(x), -122 <= x <= 0. x rounds twice, so it errs by 244 u, and Px by exp(244 u) - 1 < 244.01 u.
# A smaller D lies below 2^-175: there the absolute bound, 2^-178, is larger than all that.
@rnd = float<ieee_64, ne>;
D = P / (1 + P);
Da = rnd(Pa / rnd(1 + Pa));
{ P in [1.0e-53, 1] /\ Px -/ P in [-2.70906e-14, 2.70906e-14] /\ Pa -/ Px in [-1b-50, 1b-50] -> |(Da - D) / D * 1b53| <= BOUND }
(Da - D) / D -> (1 + (Da - Pa / rnd(1 + Pa)) / (Pa / rnd(1 + Pa))) * (1 + (Pa - P) / P * (1 / (1 + Pa))) / (1 + (rnd(1 + Pa) - (1 + Pa)) / (1 + Pa)) - 1;
