"""An engine that says what its arguments say, without NumPy: `python scripted.py HELLO ANSWER...`.

An answer is a line; `%` in it stands for the id of the request. `die` ends the process, `hang` waits for ever.
"""

import json
import sys
import time

HELLO = {
    "protocol": 1, "spec": "0.3.0", "name": "scripted", "version": "1", "precision": "float64",
    "families": {"diversity": ["diverse"], "nestedkv": ["anomaly_score"]},
}

if __name__ == "__main__":
    changes, *answers = sys.argv[1:]
    hello = json.dumps({"id": 0, "result": {**HELLO, **json.loads(changes)}})
    for said in [hello, *answers]:
        number = json.loads(sys.stdin.readline())["id"]
        if said == "die":
            print("a last word", file=sys.stderr)
            sys.exit(7)
        if said == "hang":
            time.sleep(1000)
        print(said.replace("%", str(number)), flush=True)
    sys.stdin.read()
