"""`python -m conformance.proofs`."""

import sys

from conformance.proofs.report import main

sys.exit(main())
