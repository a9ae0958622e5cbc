import sys
from conformance.saboteurs.__main__ import trials, line, summary
from conformance.saboteurs import SABOTEURS
from time import perf_counter
names=[n for n,s in SABOTEURS.items() if s.wrong.__module__ in ("conformance.saboteurs.activation","conformance.saboteurs.decode")]
if __name__=="__main__":
    print(len(names),flush=True)
    t=perf_counter();res=[]
    for n,r in zip(names,trials(names,2)):
        res.append(r); print(line(SABOTEURS[n],*r),flush=True)
    print(summary(res,perf_counter()-t)[0])
