"""`python -m conformance.assurance.proofs`."""

import sys

from conformance.assurance.proofs.report import main

sys.exit(main())
