"""`python -m conformance.vectors`."""

import sys

from conformance.vectors.store import main

sys.exit(main())
