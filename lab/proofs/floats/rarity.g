# U = 1 / (1 + L) of L = ln(1 + c), for counts below 2^23: by binade, La within 4 ulp. Below 16, 1 + La is mostly exact.
@rnd = float<ieee_64, ne>;
La = rnd(x);
Ua = rnd(1 / rnd(1 + La));
U = 1 / (1 + L);
{ CASE -> |(Ua - U) / U * 1b53| <= BOUND }
(Ua - U) / U -> (1 + (Ua - 1 / rnd(1 + La)) / (1 / rnd(1 + La))) / (1 + ((rnd(1 + La) - (1 + La)) + (La - L)) / (1 + L)) - 1;
$ L in 16;
