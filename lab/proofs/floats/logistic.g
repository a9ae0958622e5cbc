# The logistic's own error: P = exp(-|x|), Pa within 4 ulp (8 u), then 1 / (1 + P) or P / (1 + P).
@rnd = float<ieee_64, ne>;
{ P in [1b-1000, 1] /\ Pa -/ P in [-1b-50, 1b-50]
  -> |(rnd(1 / rnd(1 + Pa)) - 1 / (1 + P)) * 1b53| <= BOUND /\ |(rnd(Pa / rnd(1 + Pa)) - P / (1 + P)) * 1b53| <= BOUND }
rnd(Pa / rnd(1 + Pa)) - P / (1 + P) -> (rnd(Pa / rnd(1 + Pa)) - Pa / rnd(1 + Pa)) + Pa / (1 + Pa) * (1 / (1 + (rnd(1 + Pa) - (1 + Pa)) / (1 + Pa)) - 1) + (Pa - P) / P * (P / ((1 + Pa) * (1 + P)));
$ P in 8;
