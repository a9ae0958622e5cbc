"""Engine that answers with the lines of its arguments, without NumPy: `python scripted.py HELLO ANSWER...`.

An answer is a line, in which `%` is replaced by the id of the request. Some answers are actions:

- `die` ends the process.
- `hang` waits forever.
- `child` waits forever, and starts a child in a separate session. The child keeps standard output open.
- `orphan` starts such a child and ends.
- `flood` writes a line without an end.
- `complain` fills standard error.
- `environment` answers with the environment variables whose names begin with the name of the engine.
"""

import json
import os
import subprocess
import sys
import time

HELLO = {
    "protocol": 1, "spec": "0.4.0", "name": "scripted", "version": "1", "precision": "float64",
    "families": {"diversity": ["diverse"], "nestedkv": ["anomaly_score"]},
}

if __name__ == "__main__":
    changes, *answers = sys.argv[1:]
    hello = json.dumps({"id": 0, "result": {**HELLO, **json.loads(changes)}})
    for line in [hello, *answers]:
        number = json.loads(sys.stdin.readline())["id"]
        if line == "die":
            print("a last word", file=sys.stderr)
            sys.exit(7)
        if line in ("child", "orphan"):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(40)"], start_new_session=True)
        if line == "orphan":
            sys.exit(0)
        if line in ("hang", "child"):
            time.sleep(1000)
        if line == "flood":
            while True:
                os.write(1, bytes(1 << 20))
        while line == "complain":
            os.write(2, b"!" * (1 << 16))
        if line == "environment":
            variables = [name for name in os.environ if name.startswith(("PYTEST", "KVSPEC", "HYPOTHESIS"))]
            line = json.dumps({"id": number, "error": " ".join(["it sees", *variables])})
        print(line.replace("%", str(number)), flush=True)
    sys.stdin.read()
